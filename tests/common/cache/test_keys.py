"""The key of a build depends on exactly the inputs that change its result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.building import keys
from builder.building.keys import build_key, stage_keys
from builder.common import hashing as digests
from builder.common.errors import CheckpointError, SpecError
from builder.common.hashing import digest_of, sha256_of
from builder.options import BuildSpec, make_spec


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    yield
    keys.code.cache_clear()
    keys.libraries.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with files that look like a checkpoint's."""
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
        (checkpoint / name).write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"w" * (2 << 20))
    return checkpoint


def _spec(folder: Path, **options: object) -> BuildSpec:
    return make_spec(model=str(folder), **options)


def test_key_ignores_output_and_load(folder: Path, tmp_path: Path) -> None:
    key = build_key(_spec(folder))
    assert key == build_key(_spec(folder, output=tmp_path / "other", keep=5, load={"requests_per_s": 3}))
    assert key == build_key(_spec(folder, output="s3://bucket/models"))
    assert key == build_key(_spec(folder, name="checkpoint")), "which is its name in any case"
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    (folder / "pytorch_model.bin").touch()
    assert key == build_key(_spec(folder)), "nothing of these is read"


@pytest.mark.parametrize("options", [{"precision": "int8"}, {"max_batch_size": 8}, {"serving": {"spinning": False}}])
def test_key_covers_each_option(folder: Path, options: dict[str, object]) -> None:
    assert build_key(_spec(folder)) != build_key(_spec(folder, **options))


@pytest.mark.parametrize("name", ["config.json", "1_Pooling/config.json", "model.safetensors"])
def test_key_covers_each_file(folder: Path, name: str) -> None:
    key = build_key(_spec(folder))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(b"[" + content[1:])
    assert build_key(_spec(folder)) != key
    (folder / name).write_bytes(content)
    assert build_key(_spec(folder)) == key
    (folder / name).rename(folder / f"{name}.json")
    assert build_key(_spec(folder)) != key


def test_key_tells_given_slots_from_those_of_the_card(folder: Path) -> None:
    """Regression: with --slots 16, the default, a build for a T4 reused the graph over blocks of one without."""
    on_t4: dict[str, object] = {"target": "cuda", "precision": "fp16", "gpu": "t4"}
    sized, given = _spec(folder, **on_t4), _spec(folder, **on_t4, slots=16)
    assert build_key(sized) != build_key(given)
    assert stage_keys(sized)["select"] != stage_keys(given)["select"]
    too_long_for_blocks = _spec(folder, **on_t4, serving={"prefill_tokens": 2048})
    assert stage_keys(sized)["select"] != stage_keys(too_long_for_blocks)["select"]
    assert build_key(_spec(folder)) == build_key(_spec(folder, slots=16)), "on a CPU the default is a number"


def test_key_covers_the_files_of_a_draft_not_their_path(folder: Path, tmp_path: Path) -> None:
    drafts = [Path(shutil.copytree(folder, tmp_path / parent / "small")) for parent in ("one", "other")]
    key = build_key(_spec(folder, draft=str(drafts[0])))
    assert key == build_key(_spec(folder, draft=str(drafts[1])))
    assert key != build_key(_spec(folder))
    (drafts[1] / "config.json").write_text("[]")
    assert key != build_key(_spec(folder, draft=str(drafts[1])))


def test_key_covers_samples_and_graph(folder: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"text_input": "one"}')
    key = build_key(_spec(folder, samples=samples))
    samples.write_text('{"text_input": "two"}')
    assert build_key(_spec(folder, samples=samples)) != key
    with pytest.raises(SpecError, match=r"nowhere.jsonl cannot be read"):
        build_key(_spec(folder, samples=tmp_path / "nowhere.jsonl"))
    with pytest.raises(CheckpointError, match="neither a folder nor a Hub id"):
        build_key(_spec(folder / "config.json"))


def _unchanged_for_long(file: Path) -> None:
    """Set the times of a file to the past, as far as the file system allows: the time of its inode cannot be set.

    Wait for the next tick of the file system's clock, several milliseconds, so that a later change is noticed.
    """
    os.utime(file, ns=(10**18, 10**18))
    changed, clock = file.stat().st_ctime_ns, file.parent.parent / "clock"
    clock.touch()
    while clock.stat().st_ctime_ns <= changed:
        clock.touch()


def test_key_reads_weights_once_until_they_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(*files: Path) -> str:
        read.extend(file.name for file in files)
        return sha256_of(*files)

    monkeypatch.setattr(digests, "sha256_of", counted)
    monkeypatch.setattr(digests, "MIN_AGE_S", -1.0)
    weights = folder / "model.safetensors"
    _unchanged_for_long(weights)
    first = digest_of([weights])
    assert (digest_of([weights]), read) == (first, ["model.safetensors"])
    weights.write_bytes(b"v" * (2 << 20))
    _unchanged_for_long(weights)
    assert digest_of([weights]) != first, "as large and as old as before"
    assert len(read) == 2
    for file in (folder.parent / "cache" / "digests").iterdir():
        file.write_text("{")
    assert digest_of([weights]) != first
    assert len(read) == 3


def test_key_reads_recently_changed_files_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MIN_AGE_S", 600.0)
    digest_of([folder / "model.safetensors"])
    assert not (folder.parent / "cache").exists()


def test_key_covers_libraries_and_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = build_key(_spec(folder))
    monkeypatch.setattr(keys, "package_versions", lambda names: dict.fromkeys(names, "1") | {"onnxruntime": "0.0.1"})
    keys.libraries.cache_clear()
    other = build_key(_spec(folder))
    monkeypatch.setattr(keys, "package_versions", lambda names: dict.fromkeys(names, "1") | {"onnxruntime": "0.0.2"})
    keys.libraries.cache_clear()
    assert len({key, other, build_key(_spec(folder))}) == 3
    code = tmp_path / "builder"
    code.mkdir()
    (code / "pipeline.py").write_text("def build(): ...")
    monkeypatch.setattr(keys, "PACKAGE", code)
    seen = set()
    for content in ("def build(): ...", "def build(): pass"):
        (code / "pipeline.py").write_text(content)
        keys.code.cache_clear()
        seen.add(build_key(_spec(folder)))
    assert len(seen) == 2


def test_key_needs_no_torch(folder: Path) -> None:
    program = (
        "import sys; from builder.building.keys import build_key; from builder.options import make_spec; "
        "build_key(make_spec(model=sys.argv[1])); "
        "print({'torch', 'transformers', 'onnx', 'onnxruntime', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""A stage runs again only if its inputs change."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.building import keys
from builder.building.families import begin, encoder
from builder.building.families.encoder import results
from builder.building.keys import EXACT, EXPORT, LAID_OUT, REFERENCE, SERVING_LAID_OUT, stage_keys
from builder.building.pipeline import build
from builder.building.stages import Reader
from builder.checkpoints.resolve import resolve
from builder.common.cache.entries import CacheEntries
from builder.common.errors import VerificationError
from builder.options import BuildSpec, Serving, make_spec
from builder.repository.report.record import BuildReport
from tests.models import GENERATORS, READERS

STAGES = ("export", "reference", "fuse", "verify", "select")
Counted = Callable[..., tuple[BuildReport, list[str]]]


@pytest.fixture(scope="module")
def first(checkpoint: Callable[[str], Path], module_folder: Callable[[str], Path]) -> Path:
    """Return the cache after one build of `topics`, and the repository beside it."""
    folder = module_folder("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILD_REPO_CACHE", str(folder / "cache"))
        build(make_spec(model=str(checkpoint("topics")), name="topics", output=folder / "repository"))
    return folder


@pytest.fixture
def again(first: Path, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return a function that builds `topics` after that build and returns the stages that ran."""
    shutil.copytree(first / "cache", tmp_path / "cache")
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    done: list[str] = []
    for stage in STAGES:
        monkeypatch.setattr(encoder.Encoder, stage, _noting(done, stage, getattr(encoder.Encoder, stage)))

    def run(model: Path | None = None, **options: Any) -> tuple[BuildReport, list[str]]:
        done.clear()
        spec = make_spec(
            model=str(model or checkpoint("topics")), **{"name": "topics", "output": tmp_path / "again", **options}
        )
        return build(spec), list(done)

    return run


def _noting(done: list[str], name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        done.append(name)
        return stage(*arguments)

    return noted


def test_same_build_reuses_every_stage(again: Counted, first: Path) -> None:
    before = json.loads((first / "repository" / "topics" / "build.json").read_text())
    report, done = again()
    assert done == []
    assert report.verified
    assert list(report.kept) == ["select"]
    assert report.files["topics"]["1/model.onnx"] == before["files"]["topics"]["1/model.onnx"]
    assert report.variants == tuple(type(report.variants[0])(**measured) for measured in before["ladder"]), (
        "as it was measured"
    )


@pytest.mark.parametrize(
    ("options", "redone"),
    [
        (
            {"max_batch_size": 8, "max_queue_delay_us": 100, "serving": {"priority_levels": 2, "default_priority": 1}},
            (),
        ),
        ({"name": "other"}, ()),
        ({"precision": "int8"}, ("select",)),
        ({"level": "O1"}, ("fuse", "verify", "select")),
        ({"serving": {"token_budget": 512}}, ("reference", "fuse", "verify", "select")),
        ({"max_length": 32}, STAGES),
    ],
)
def test_option_reruns_only_the_stages_that_depend_on_it(
    again: Counted, tmp_path: Path, options: dict[str, Any], redone: tuple[str, ...]
) -> None:
    report, done = again(**options)
    assert tuple(done) == redone
    served = json.loads((tmp_path / "again" / report.name / "1" / "serving.json").read_text())
    assert served["batching"]["max_rows"] == options.get("max_batch_size", 64)
    assert again(**options)[1] == []


def test_auto_does_not_reuse_latencies_of_a_fixed_precision(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a choice between variants, latency is measured only roughly. All of these verify on held-out samples."""
    options: dict[str, Any] = {"model": str(checkpoint("topics")), "output": tmp_path}
    chosen, stated = ({**options, "precision": one} for one in ("auto", "int8-static"))
    for engine in ({}, {"engine": "auto"}):
        of_chosen, of_stated = (stage_keys(make_spec(**one, **engine)) for one in (chosen, stated))
        assert [stage for stage in STAGES if of_chosen[stage] != of_stated[stage]] == ["verify", "select"]


def test_other_weights_rerun_every_stage(again: Counted, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    other = tmp_path / checkpoint("topics").name
    shutil.copytree(checkpoint("topics"), other)
    assert again(other)[1] == [], "a copy is the same"
    weights = other / "model.safetensors"
    before = weights.stat()
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("query.weight"))
    save_file({**tensors, name: tensors[name] + torch.tensor(0.125)}, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    report, done = again(other)
    assert tuple(done) == STAGES
    assert report.kept == {}


@pytest.mark.parametrize("changed", ["libraries", "code"])
def test_other_libraries_or_code_rerun_every_stage(
    again: Counted, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(keys, changed, lambda: (("torch", "another"),) if changed == "libraries" else "another")
    assert tuple(again()[1]) == STAGES


def test_damaged_stage_is_run_again(again: Counted, tmp_path: Path) -> None:
    graph = max((tmp_path / "cache" / "blobs").iterdir(), key=lambda blob: blob.stat().st_size)
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    report, done = again()
    assert "select" in done
    assert report.files["topics"]["1/model.onnx"] == again(name="sound")[0].files["sound"]["1/model.onnx"]
    for path in (tmp_path / "cache" / "stages").iterdir():
        path.write_text("{")
    assert tuple(again()[1]) == STAGES
    assert again()[1] == []


def test_reused_stage_is_compared_again(again: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of an earlier build does not suffice to publish."""
    monkeypatch.setattr(results, "TOLERANCE", -1.0)
    with pytest.raises(VerificationError, match="the error of the fused graph"):
        again()


def test_cache_off_keeps_nothing(again: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", "off")
    report, done = again()
    assert tuple(done) == STAGES
    assert report.kept == {}


def test_cached_document_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system"):
        Reader(io.BytesIO(pickle.dumps(os.system)), None).load()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["topics", "writes", pytest.param("sums", marks=pytest.mark.slow)])
def test_stage_reads_only_options_of_its_key(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    read: set[str] = set()
    changes: dict[str, dict[str, Any]] = {"writes": {"max_length": 64}, "sums": {"task": "summarization"}}
    spec = _recording(read)(model=str(checkpoint(name)), output=tmp_path, **changes.get(name, {}))
    family = begin(spec, resolve(spec), tmp_path, lambda stage: nullcontext())
    laid_out = {*LAID_OUT, *(f"serving.{name}" for name in SERVING_LAID_OUT)}

    def unseen(known: tuple[str, ...]) -> set[str]:
        unknown = {option for option in read if option.split(".")[0] not in known or option in laid_out}
        read.clear()
        return unknown

    read.clear()
    exported = family.export()
    assert unseen(EXPORT) == set()
    reference = family.reference(exported)
    assert unseen((*REFERENCE, "samples")) == set()
    fused = family.fuse(exported)
    assert unseen(EXACT) == set()
    exact = family.verify(fused, reference)
    fitted = {"precision", "prune"}  # the key contains `fits` instead
    assert unseen((*EXACT, "samples")) <= {*fitted, "max_batch_size", "name", "model"}
    family.select(exact, lambda stage: nullcontext())
    assert unseen(tuple(BuildSpec.model_fields)) <= {"max_batch_size", "name"}


def _recording(read: set[str]) -> type[BuildSpec]:
    """Return a specification class that records which of its options are read."""

    class RecordedServing(Serving):
        def __getattribute__(self, name: str) -> Any:
            if name in Serving.model_fields:
                read.add(f"serving.{name}")
            return super().__getattribute__(name)

    class Recorded(BuildSpec):
        def __getattribute__(self, name: str) -> Any:
            if name in BuildSpec.model_fields and name != "serving":
                read.add(name)
            value = super().__getattribute__(name)
            return RecordedServing(**dict(value)) if name == "serving" else value

    return Recorded


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("writes", GENERATORS["writes"][1]),
        pytest.param("writes_openvino", GENERATORS["writes_openvino"][1], marks=pytest.mark.slow),
        pytest.param("sums", READERS["sums"][2], marks=pytest.mark.slow),
    ],
)
def test_generating_models_reuse_stages(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    spec = {"model": str(checkpoint(name)), "name": name, **options}
    first = build(make_spec(**spec, output=tmp_path / "first"))
    again = build(make_spec(**spec, output=tmp_path / "again"))
    assert list(again.kept) == ["select"]
    assert again.files == first.files
    smaller = {"precision": "int8", "quality": 0.0, "perplexity": 1e9}
    assert list(build(make_spec(**spec, **smaller, output=tmp_path / "int8")).kept) == ["verify"]


def test_cache_entries_name_their_stage_and_model(again: Counted, tmp_path: Path) -> None:
    entries = [entry for entry, _ in CacheEntries(tmp_path / "cache").all()]
    assert {entry.stage for entry in entries} == set(STAGES)
    assert {entry.model for entry in entries} == {"topics"}
    assert set(stage_keys(make_spec(model=str(tmp_path)))) == set(STAGES)

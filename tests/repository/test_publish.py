"""Publishing: whole or not at all, whatever happens and whenever."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from builder.errors import RepositoryError
from builder.report import BuildReport, Rung
from builder.repository import publish as publish_module
from builder.repository.layout import Config, RepositoryEntry
from builder.repository.publish import existing_source, publish, recover
from builder.spec import Serving
from builder.verify.verdict import Unverified


def _entries(content: bytes) -> tuple[RepositoryEntry, ...]:
    entries = []
    for name in ("front", "front_model"):
        config = Config(name, "python", 1, [], [], [], Serving(), dynamic_batching=False)
        entries.append(RepositoryEntry(name, config, {"1/model.py": content}))
    return tuple(entries)


def _report() -> BuildReport:
    return BuildReport(
        name="front",
        task="feature-extraction",
        triton="24.10",
        checkpoint={"source": "org/name"},
        versions={"torch": "2"},
        cpu={"model": "a CPU", "flags": []},
        attention={"fused": 0, "layers": 0},
        operators={},
        quantised=None,
        ladder=(Rung("fp32", 1, {}),),
        metric="cosine",
        threshold=0.99,
        samples=0,
        padding=0.0,
        warnings=(),
        files={},
    )


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _publish(repository: Path, content: bytes) -> None:
    publish(repository, Unverified(_entries(content), _report()))


def test_all_files_arrive_and_nothing_else_is_left(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    files = _tree(repository)
    of_each = ("1/model.py", "build.json", "config.pbtxt")
    assert sorted(files) == sorted(
        ["front/report.html", *(f"{n}/{f}" for n in ("front", "front_model") for f in of_each)]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]
    assert existing_source(repository, "front") == "org/name"
    assert existing_source(repository, "absent") is None


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    _publish(repository, b"two")
    assert {content for name, content in _tree(repository).items() if name.endswith("model.py")} == {b"two"}


def test_a_front_model_never_appears_before_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    rename = os.rename

    def noting(source: Path, target: Path) -> None:
        moved.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(publish_module.os, "rename", noting)
    _publish(tmp_path / "model_repository", b"one")
    assert moved == ["front_model", "front"]


def test_only_what_says_whether_it_was_verified_is_published(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="only Verified or Unverified entries are published, not tuple"):
        publish(tmp_path / "model_repository", _entries(b"one"))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", range(1, 5))
def test_an_error_at_any_move_leaves_what_was_there(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(tmp_path)
    calls = 0
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.EIO, "simulated")
        rename(source, target)

    monkeypatch.setattr(publish_module.os, "rename", failing)
    with pytest.raises(RepositoryError, match="nothing in it was changed"):
        _publish(repository, b"two")
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("moves", range(5))
def test_a_killed_build_is_undone_by_the_next_command(moves: int, tmp_path: Path) -> None:
    """The process dies, without any clean-up, after so many moves."""
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    program = f"""
        import os
        from pathlib import Path
        from tests.repository.test_publish import _publish
        rename, left = os.rename, {moves}
        def dying(source, target):
            global left
            if left == 0:
                os._exit(9)
            left -= 1
            rename(source, target)
        os.rename = dying
        os.unlink = lambda path: os._exit(9)
        _publish(Path({str(repository)!r}), b"two")
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == 9
    recover(repository)
    assert _tree(repository) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


def test_a_full_disk_is_named_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(tmp_path)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish_module, "_sync", full)
    with pytest.raises(RepositoryError, match="No space left on device"):
        _publish(repository, b"two")
    assert _tree(tmp_path) == before


def test_an_output_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RepositoryError, match="could not be written"):
        _publish(tmp_path / "file" / "model_repository", b"one")


def test_the_folder_of_a_build_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    repository.mkdir()
    running = tmp_path / f".model_repository.{os.getppid()}.x.staging"
    running.mkdir()
    assert recover(repository) == []
    assert running.is_dir()

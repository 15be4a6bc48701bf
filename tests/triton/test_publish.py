"""Publishing: whole or not at all, whatever happens and whenever."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.errors import RepositoryError
from builder.report.provenance import file_hashes
from builder.report.record import BuildReport, Rung
from builder.spec import Serving
from builder.triton import publish as publish_module
from builder.triton.layout import Config, RepositoryEntry
from builder.triton.publish import existing_source, publish, recover
from builder.verify.verdict import Unverified


def _entries(content: bytes) -> tuple[RepositoryEntry, ...]:
    entries = []
    for name in ("front", "front_model"):
        config = Config(name, "mine", 1, [], [], [], Serving(), dynamic_batching=False)
        entries.append(RepositoryEntry(name, config, {"1/model.bin": content}))
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
    entries = _entries(content)
    publish(repository, Unverified(entries, replace(_report(), files=file_hashes(entries))))


def test_all_files_arrive_and_nothing_else_is_left(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    files = _tree(repository)
    of_each = ("1/model.bin", "build.json", "config.pbtxt")
    assert sorted(files) == sorted(
        ["front/bom.cdx.json", "front/report.html", *(f"{n}/{f}" for n in ("front", "front_model") for f in of_each)]
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]
    assert existing_source(repository, "front") == "org/name"
    assert existing_source(repository, "absent") is None


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    _publish(repository, b"two")
    assert {content for name, content in _tree(repository).items() if name.endswith("model.bin")} == {b"two"}


def test_an_engine_that_the_next_build_has_inside_is_taken_out(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    entries = _entries(b"one")
    publish(repository, Unverified(entries, replace(_report(), files=file_hashes(entries))))
    (repository / "another_model").mkdir()
    publish(repository, Unverified(entries[:1], replace(_report(), files=file_hashes(entries[:1]))))
    assert sorted(path.name for path in repository.iterdir()) == ["another_model", "front"]
    assert [path.name for path in tmp_path.iterdir()] == ["model_repository"]


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


@pytest.mark.parametrize(("moving", "call"), [("exchange", 1), ("exchange", 2), *(("renames", n) for n in range(1, 5))])
def test_an_error_at_any_move_leaves_what_was_there(
    moving: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries change places in one step, or in two on a file system that has no other."""
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(tmp_path)
    calls = 0
    step = os.rename if moving == "renames" else publish_module._exchange

    def failing(source: Path, target: Path) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.EIO, "simulated")
        return step(source, target)

    if moving == "renames":
        monkeypatch.setattr(publish_module, "_exchange", lambda a, b: False)
        monkeypatch.setattr(publish_module.os, "rename", failing)
    else:
        monkeypatch.setattr(publish_module, "_exchange", failing)
    with pytest.raises(RepositoryError, match="nothing in it was changed"):
        _publish(repository, b"two")
    assert _tree(tmp_path) == before


def test_no_entry_is_missing_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts in the middle finds every model: nothing is moved away before what replaces it is there."""
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")

    def seen(change: Callable[..., object]) -> Callable[..., object]:
        def changing(*arguments: Any, **options: Any) -> object:
            result = change(*arguments, **options)
            assert sorted(entry.name for entry in repository.iterdir()) == ["front", "front_model"]
            return result

        return changing

    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(publish_module.os, name, seen(getattr(os, name)))
    monkeypatch.setattr(publish_module, "_exchange", seen(publish_module._exchange))
    _publish(repository, b"two")
    assert {content for name, content in _tree(repository).items() if name.endswith("model.bin")} == {b"two"}


def test_a_killed_build_is_undone_by_the_next_command(tmp_path: Path) -> None:
    """The process dies, without any clean-up, after so many moves of either kind."""
    killed = [("exchange", moves) for moves in range(3)] + [("renames", moves) for moves in range(5)]
    program = f"""
        import os
        from pathlib import Path
        from builder.triton import publish
        from tests.triton.test_publish import _publish

        def dying(step, left):
            def move(source, target):
                nonlocal left
                left -= 1
                return os._exit(9) if left < 0 else step(source, target)
            return move

        def die(kind, moves, repository):
            if kind == "renames":
                publish._exchange = lambda a, b: False
                os.rename = dying(os.rename, moves)
            else:
                publish._exchange = dying(publish._exchange, moves)
            os.unlink = lambda path: os._exit(9)
            _publish(repository, b"two")

        for kind, moves in {killed!r}:
            repository = Path({str(tmp_path)!r}) / kind / str(moves) / "model_repository"
            _publish(repository, b"one")
            child = os.fork()
            if not child:
                die(kind, moves, repository)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    _publish(tmp_path / "whole" / "model_repository", b"one")
    before = _tree(tmp_path / "whole" / "model_repository")
    for kind, moves in killed:
        repository = tmp_path / kind / str(moves) / "model_repository"
        assert len(list(repository.parent.iterdir())) > 1
        recover(repository)
        assert _tree(repository) == before
        assert [p.name for p in repository.parent.iterdir()] == ["model_repository"]


@pytest.mark.parametrize("journal", [None, "", "{", "{}"])
def test_a_build_killed_before_anything_moved_leaves_no_trace(journal: str | None, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    staging = tmp_path / ".model_repository.x.staging"
    (staging / "new" / "front").mkdir(parents=True)
    if journal is not None:
        (staging / publish_module.JOURNAL).write_text(journal)
    assert recover(repository) == []
    assert _tree(repository) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


def test_what_cannot_be_put_back_is_kept_and_put_back_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    exchange, calls = publish_module._exchange, 0

    def failing(a: Path, b: Path) -> bool:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.EIO, "simulated")
        return exchange(a, b)

    monkeypatch.setattr(publish_module, "_exchange", failing)
    with pytest.raises(RepositoryError, match=r"nor what was there put back .*: it is kept in .* build-repo check"):
        _publish(repository, b"two")
    with pytest.raises(RepositoryError, match="what it replaced cannot be put back"):
        recover(repository)
    monkeypatch.setattr(publish_module, "_exchange", exchange)
    assert recover(repository) == ["front", "front_model"]
    assert _tree(repository) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


def test_builds_into_one_repository_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes last is whole: a front and an engine of one build."""
    repository = tmp_path / "model_repository"
    inside = threading.Lock()
    swap = publish_module._swap

    def slow(*arguments: Any) -> None:
        assert inside.acquire(blocking=False), "two builds publish at once"
        time.sleep(0.02)
        swap(*arguments)
        inside.release()

    monkeypatch.setattr(publish_module, "_swap", slow)
    with ThreadPoolExecutor(4) as builders:
        list(builders.map(lambda content: _publish(repository, content), [b"one", b"two", b"three", b"four"]))
    contents = {content for name, content in _tree(repository).items() if name.endswith("model.bin")}
    assert len(contents) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free some space, or choose another folder"),
        (errno.EACCES, "Let this user write to it"),
        (errno.EROFS, "Let this user write to it"),
        (errno.ENOTEMPTY, r"changed\. Choose another folder"),
    ],
)
def test_an_error_says_what_to_do_about_it(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(publish_module, "_sync", failing)
    with pytest.raises(RepositoryError, match=advice):
        _publish(tmp_path / "model_repository", b"one")


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
    """It holds the lock; the process whose number an earlier folder has in its name counts for nothing."""
    repository = tmp_path / "model_repository"
    repository.mkdir()
    dead = tmp_path / f".model_repository.{os.getppid()}.x.staging"
    dead.mkdir()
    with ThreadPoolExecutor(1) as other:
        with publish_module._alone(repository), publish_module._staging(repository) as staging:
            recovering = other.submit(recover, repository)
            time.sleep(0.05)
            assert staging.is_dir()
            assert dead.is_dir()
            assert not recovering.done()
        assert recovering.result(timeout=10) == []
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]

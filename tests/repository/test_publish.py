"""Publishing is atomic, whenever it fails or is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from builder.cli import main
from builder.common.errors import RepositoryError
from builder.options import Serving
from builder.repository import locks
from builder.repository import publish as publish_module
from builder.repository import versions as versions_module
from builder.repository.check import check, pending
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.publish import existing_source, publish
from builder.repository.report.record import BuildReport, file_hashes
from builder.repository.transaction import JournalStep, RepositoryChange, recover
from builder.repository.verdict import Unverified
from builder.repository.versions import loaded_numbers, newest_first, remove, rollback, served_number, version_numbers
from tests.reports import REPORT


def _entries(content: bytes, batch: int = 1) -> tuple[RepositoryEntry, ...]:
    entries = []
    for name in ("front", "front_model"):
        config = Config(name, "mine", batch, [], [], [], Serving(), dynamic_batching=False)
        files: dict[str, bytes | Path] = {"1/model.bin": content}
        entries.append(RepositoryEntry(name, config, files | ({} if name == "front" else {"warmup/1/text": b"Hello"})))
    return tuple(entries)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _publish(repository: Path, content: bytes, keep: int = 2, batch: int = 1) -> BuildReport:
    entries = _entries(content, batch)
    return publish(repository, Unverified(entries, replace(REPORT, files=file_hashes(entries))), keep)


def _contents(repository: Path) -> set[bytes]:
    """Return the models' files, of the versions that are served."""
    loaded = [entry / str(number) for entry in repository.iterdir() for number in loaded_numbers(entry)]
    return {(version / "model.bin").read_bytes() for version in loaded}


def _whole(repository: Path) -> None:
    """Check that a server started now finds every front together with the engine version that it calls."""
    number = served_number(repository / "front")
    assert number in loaded_numbers(repository / "front_model")
    contents = {(repository / name / str(number) / "model.bin").read_bytes() for name in ("front", "front_model")}
    assert len(contents) == 1


@pytest.fixture(autouse=True)
def _no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions_module, "OVERLAP_S", 0)


def test_publish_writes_all_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    files = _tree(repository)
    of_each = ("1/model.bin", "1/build.json", "1/config.pbtxt", "build.json", "config.pbtxt")
    pages = [f"front/{folder}{file}" for folder in ("", "1/") for file in ("bom.cdx.json", "report.html")]
    more = [*pages, "front_model/warmup/1/text"]
    assert sorted(files) == sorted([*more, *(f"{n}/{f}" for n in ("front", "front_model") for f in of_each)])
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]
    assert existing_source(repository, "front") == "org/name"
    assert existing_source(repository, "absent") is None


def test_publish_keeps_enough_versions_for_two_rollbacks(tmp_path: Path) -> None:
    """Regression: only two versions remained, so that only one rollback was possible."""
    repository = tmp_path / "model_repository"
    for content in (b"one", b"two", b"three", b"four"):
        entries = _entries(content)
        publish(repository, Unverified(entries, replace(REPORT, files=file_hashes(entries))))
    assert version_numbers(repository / "front") == [2, 3, 4]
    assert [rollback(repository, "front"), rollback(repository, "front")] == [3, 2]


def test_publish_serves_a_second_build_as_the_next_version(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    assert _publish(repository, b"one").version == 1
    report = _publish(repository, b"two")
    assert report.version == 2
    assert sorted(report.files["front"]) == ["2/model.bin"]
    for name in ("front", "front_model"):
        assert version_numbers(repository / name) == [1, 2]
        assert loaded_numbers(repository / name) == [2]
        for file in ("build.json", "config.pbtxt"):
            assert (repository / name / file).read_bytes() == (repository / name / "2" / file).read_bytes()
    assert _contents(repository) == {b"two"}
    assert check(repository) == []


def test_publish_links_files_of_the_build(tmp_path: Path) -> None:
    """Other files, such as a checkpoint's, are copied: their owner may change them."""
    place, theirs, repository = (tmp_path / name for name in ("place", "theirs", "model_repository"))
    for folder in (place, theirs):
        folder.mkdir()
        (folder / "model.bin").write_bytes(folder.name.encode())
    entry, _ = _entries(b"")
    for number, folder in enumerate((place, theirs), 1):
        entries = (replace(entry, files={"1/model.bin": folder / "model.bin"}),)
        made = Unverified(entries, replace(REPORT, files=file_hashes(entries)))
        publish(repository, made, workplace=place)
        published = repository / "front" / str(number) / "model.bin"
        assert published.read_bytes() == folder.name.encode()
        assert published.samefile(folder / "model.bin") == (folder == place)


def test_publish_links_files_that_two_versions_share(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    _publish(repository, b"one")
    _publish(repository, b"two")
    first, second, third = (repository / "front" / number / "model.bin" for number in "123")
    assert not first.exists(), "two versions remain"
    assert second.samefile(repository / "front_model" / "2" / "model.bin"), "the engine has the same"
    assert second.stat().st_nlink == 2
    _publish(repository, b"two")
    assert third.samefile(repository / "front" / "4" / "model.bin")
    warmups = repository / "front_model" / "warmup"
    assert (warmups / "3" / "text").samefile(warmups / "4" / "text")
    assert sorted(path.name for path in warmups.iterdir()) == ["3", "4"]


def test_publish_keeps_the_requested_versions_and_the_served_one(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    for content in (b"one", b"two", b"three"):
        _publish(repository, content, keep=3)
    assert rollback(repository, "front", 1) == 1
    _publish(repository, b"four", keep=2)
    assert version_numbers(repository / "front") == version_numbers(repository / "front_model") == [1, 4]
    _publish(repository, b"five", keep=1)
    assert version_numbers(repository / "front") == version_numbers(repository / "front_model") == [5]


def test_concurrent_equal_builds_publish_one_version(tmp_path: Path) -> None:
    """Regression: each published a version, and with two kept versions the one to roll back to was removed."""

    def build(content: bytes, since: int) -> BuildReport:
        entries = _entries(content)
        report = replace(REPORT, files=file_hashes(entries), build_key=content.decode())
        return publish(tmp_path, Unverified(entries, report), since=since)

    build(b"before", since=0)
    first, second = (build(b"same", since=1) for _ in range(2))
    assert second == first
    assert version_numbers(tmp_path / "front") == [1, 2]
    assert build(b"same", since=2).version == 3, "--rebuild"
    assert build(b"other", since=2).version == 4


def test_rollback_restores_files_and_configuration(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    _publish(repository, b"two")
    assert rollback(repository, "front") == 1
    assert _contents(repository) == {b"one"}
    assert {name: content for name, content in _tree(repository).items() if name in before} == before
    assert check(repository) == []
    assert rollback(repository, "front", 2) == 2
    assert _contents(repository) == {b"two"}


def test_versions_rollback_and_remove_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    _publish(repository, b"two")
    where = ["--repository", str(repository)]
    assert main(["rollback", "front", *where]) == 0
    assert "front: version 1 is served from" in capsys.readouterr().err
    assert main(["versions", "front", *where]) == 0
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "24.10" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["2", ""], ["1", "served"]]
    assert main(["remove", "front_model", *where]) == 1
    assert main(["remove", "front", *where]) == 0
    assert "removed front and front_model" in capsys.readouterr().err
    assert list(repository.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("front", None, r"front has no earlier version to go back to; it has 1, and 1 is served"),
        ("front", 7, r"front has no version 7 to go back to; it has 1, and 1 is served"),
        ("front_model", None, r"front_model is the engine of front, and changes with it: name front"),
        ("other", None, r"has no model other; it has front \(--repository\)"),
    ],
)
def test_rollback_refuses_a_missing_version(name: str, number: int | None, message: str, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    with pytest.raises(RepositoryError, match=message):
        rollback(repository, name, number)


def test_engine_is_removed_with_the_last_version_that_calls_it(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    entries = _entries(b"one")
    publish(repository, Unverified(entries, replace(REPORT, files=file_hashes(entries))))
    (repository / "another_model").mkdir()
    inside = Unverified(entries[:1], replace(REPORT, files=file_hashes(entries[:1])))
    publish(repository, inside)
    assert sorted(path.name for path in repository.iterdir()) == ["another_model", "front", "front_model"]
    assert rollback(repository, "front") == 1
    assert rollback(repository, "front", 2) == 2
    publish(repository, inside, keep=2)
    assert sorted(path.name for path in repository.iterdir()) == ["another_model", "front"]
    assert [path.name for path in tmp_path.iterdir()] == ["model_repository"]


def test_remove_includes_the_engine_unless_another_front_calls_it(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    other = repository / "other" / "1"
    other.mkdir(parents=True)
    (other.parent / "config.pbtxt").write_text('name: "other"\nbackend: "python"\n')
    (other / "serving.json").write_text('{"engine": "front_model"}')
    assert remove(repository, "front") == ["front"]
    assert sorted(path.name for path in repository.iterdir()) == ["front_model", "other"]
    shutil.rmtree(other.parent)
    shutil.rmtree(repository / "front_model")
    _publish(repository, b"one")
    assert remove(repository, "front") == ["front", "front_model"]
    assert list(repository.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["model_repository"]


def test_remove_changes_nothing_if_the_server_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    assert main(["remove", "front", "--repository", str(repository), "--url", "127.0.0.1:1"]) == 1
    assert "no Triton answers at 127.0.0.1:1" in capsys.readouterr().err
    assert _tree(repository) == before


def test_remove_refuses_a_model_that_is_a_step_of_an_ensemble(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    (repository / "all").mkdir()
    steps = 'ensemble_scheduling { step { model_name: "front" model_version: -1 } }'
    (repository / "all" / "config.pbtxt").write_text(f'name: "all"\nplatform: "ensemble"\n{steps}\n')
    with pytest.raises(RepositoryError, match="front is called by all: remove that first"):
        remove(repository, "front")


def test_version_without_a_plan_replaces_no_other(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    front, engine = _entries(b"two")
    entries = (front, replace(engine, files={"1/recipe/recipe.json": b"{}"}))
    publish(repository, Unverified(entries, replace(REPORT, files=file_hashes(entries))))
    assert version_numbers(repository / "front") == version_numbers(repository / "front_model") == [1, 2]
    assert _contents(repository) == {b"one"}
    assert pending(repository) == {}
    assert list(pending(repository, unserved=True)) == ["front_model"]


def test_engine_loads_both_versions_while_the_front_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    seen = []

    def noting(_: float) -> None:
        seen.append((loaded_numbers(repository / "front"), loaded_numbers(repository / "front_model")))

    monkeypatch.setattr(time, "sleep", noting)
    _publish(repository, b"one")
    _publish(repository, b"two")
    assert seen == [([2], [1, 2])]
    before = {path.relative_to(repository).parts[:2] for path in repository.rglob("*")}
    _publish(repository, b"three", batch=8)
    assert len(seen) == 1, "one config.pbtxt cannot say two sizes of a batch"
    assert loaded_numbers(repository / "front_model") == [3]
    after = {path.relative_to(repository).parts[:2] for path in repository.rglob("*")}
    assert after - before == {("front", "3"), ("front_model", "3")}, "nothing of the change is left"
    assert not any(path.is_symlink() for path in repository.rglob("*"))


def test_publish_continues_in_a_copy_of_an_unfinished_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, copy, link = (
        tmp_path / "model_repository",
        tmp_path / "copy" / "model_repository",
        RepositoryChange._link,
    )

    def copied(self: RepositoryChange, to: str, target: Path) -> None:
        link(self, to, target)
        if to == "after":
            shutil.copytree(repository, copy, symlinks=True)

    _publish(repository, b"one")
    with monkeypatch.context() as patched:
        patched.setattr(RepositoryChange, "_link", copied)
        _publish(repository, b"two", batch=8)
    _whole(copy)
    _publish(copy, b"three", batch=4)
    assert _contents(copy) == {b"three"}
    assert not any(path.is_symlink() or path.name == versions_module.CHANGING for path in copy.rglob("*"))


def test_publish_names_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(tmp_path)

    def refused(self: Path, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refused)
    with pytest.raises(RepositoryError, match="has no symbolic links"):
        _publish(repository, b"two", batch=8)
    assert _tree(tmp_path) == before


def test_publish_continues_a_repository_of_an_earlier_release(tmp_path: Path) -> None:
    """Earlier releases stored no configuration in versions, and let Triton load the newest version."""
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    for entry in repository.iterdir():
        for file in ("build.json", "config.pbtxt", "report.html"):
            (entry / "1" / file).unlink(missing_ok=True)
        config = (entry / "config.pbtxt").read_text()
        (entry / "config.pbtxt").write_text(
            config.replace("specific { versions: [ 1 ] }", "latest { num_versions: 1 }")
        )
    assert [version.number for version in newest_first(repository, "front")] == [1]
    _publish(repository, b"two")
    assert _contents(repository) == {b"two"}
    assert rollback(repository, "front") == 1
    assert _contents(repository) == {b"one"}
    assert check(repository) == []


def test_publish_never_shows_a_front_before_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    rename = os.rename

    def noting(source: Path, target: Path) -> None:
        moved.append("/".join(Path(target).parts[-2:]))
        rename(source, target)

    monkeypatch.setattr(os, "rename", noting)
    _publish(tmp_path / "model_repository", b"one")
    _publish(tmp_path / "model_repository", b"two")
    entries = ["model_repository/front_model", "model_repository/front"]
    assert moved == [*entries, "warmup/2", "front_model/2", "front/2"]


def test_publish_refuses_entries_without_a_verdict(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="only Verified or Unverified entries are published, not tuple"):
        publish(tmp_path / "model_repository", _entries(b"one"))  # type: ignore[arg-type]  # refused as it runs, too
    assert list(tmp_path.iterdir()) == []


def test_publish_restores_the_repository_after_an_error_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(tmp_path)
    left, record = 0, RepositoryChange._record

    def failing(self: RepositoryChange, *steps: JournalStep) -> None:
        nonlocal left
        left -= len(steps)
        if left < 0:
            raise OSError(errno.EIO, "simulated")
        record(self, *steps)

    monkeypatch.setattr(RepositoryChange, "_record", failing)
    for steps in range(9):  # three folders, and the files beside the versions
        left = steps
        with pytest.raises(RepositoryError, match="nothing in it was changed"):
            _publish(repository, b"two")
        assert _tree(tmp_path) == before
    left = 9
    assert _publish(repository, b"two").version == 2


@pytest.mark.parametrize("batch", [1, 8])
def test_publish_never_shows_a_missing_or_incomplete_model(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts during a change, without recovery, finds a front with the engine that it calls.

    Two sizes of a batch cannot share a config.pbtxt.
    """
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    moments = 0

    def seen(change: Callable[..., object]) -> Callable[..., object]:
        def changing(*arguments: Any, **options: Any) -> object:
            nonlocal moments
            result = change(*arguments, **options)
            _whole(repository)
            moments += 1
            return result

        return changing

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink"):
            patch.setattr(os, name, seen(getattr(os, name)))
        _publish(repository, b"two", batch=batch)
        assert _contents(repository) == {b"two"}
        rollback(repository, "front")
        assert _contents(repository) == {b"one"}
    assert moments > 20


@pytest.mark.parametrize("batch", [1, 8])
def test_killed_build_is_undone_by_the_next_command(batch: int, tmp_path: Path) -> None:
    """Kill the process after a number of moves, without clean-up; the repository stays consistent."""
    program = f"""
        import os, shutil
        from pathlib import Path
        from builder.repository import publish, transaction, versions
        from tests.repository.test_publish import _publish

        versions.OVERLAP_S, publish.page = 0, lambda report: "a page"
        first = Path({str(tmp_path)!r}) / "first" / "model_repository"
        _publish(first, b"one")

        def dying(step, moves):
            def move(*arguments, **options):
                moves.append(step)
                return os._exit(9) if len(moves) > number else step(*arguments, **options)
            return move

        for number in range(0, 90, 2):
            repository = Path({str(tmp_path)!r}) / str(number) / "model_repository"
            shutil.copytree(first, repository)
            child = os.fork()
            if not child:
                moves = []
                for name in ("rename", "replace", "unlink"):
                    setattr(os, name, dying(getattr(os, name), moves))
                try:
                    _publish(repository, b"two", batch={batch})
                    os._exit(0)
                finally:
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 0:
                break
            assert status == 9
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    outcomes = []
    for number in range(len(list(tmp_path.iterdir())) - 1):
        repository = tmp_path / str(2 * number) / "model_repository"
        _whole(repository)
        assert set(recover(repository)) <= {"front", "front_model"}
        _whole(repository)
        numbers = [version_numbers(repository / name) for name in ("front", "front_model")]
        outcomes.append((*numbers, _contents(repository)))
        assert [p.name for p in repository.parent.iterdir() if not p.name.endswith(".lock")] == ["model_repository"]
        assert check(repository) == []
    undone = outcomes.count(([1], [1], {b"one"}))
    assert undone > 4
    assert outcomes[undone:] == [([1, 2], [1, 2], {b"two"})] * (len(outcomes) - undone)


@pytest.mark.parametrize("journal", [None, "", "{", "[]"])
def test_build_killed_before_its_first_move_leaves_nothing(journal: str | None, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    staging = tmp_path / ".model_repository.x.staging"
    (staging / "new" / "front").mkdir(parents=True)
    if journal is not None:
        (staging / locks.JOURNAL).write_text(journal)
    assert recover(repository) == []
    assert _tree(repository) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


@pytest.mark.parametrize("journal", ['{step}\n{{"kind": "wri', "[{step}]"], ids=["cut", "of build-repo 0.4"])
def test_recover_undoes_the_steps_of_any_journal(journal: str, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    staging = tmp_path / ".model_repository.x.staging"
    staging.mkdir()
    (repository / "front").rename(staging / "old")
    step = JournalStep("move", "model_repository/front", f"{staging.name}/old")
    (staging / locks.JOURNAL).write_text(journal.format(step=json.dumps(asdict(step))))
    assert recover(repository) == ["front"]
    assert _tree(repository) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


def _no_lock(path: str | Path, *rest: Any, open: Callable[..., int] = os.open) -> int:
    if str(path).endswith("lock"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    return open(path, *rest)


def test_recover_keeps_what_it_cannot_restore_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(repository)
    rename, calls = os.rename, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.EIO, "simulated")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(RepositoryError, match=r"nor what was there put back .*: it is kept in .* build-repo check"):
        _publish(repository, b"two")
    with pytest.raises(RepositoryError, match="what it replaced cannot be put back"):
        recover(repository)
    monkeypatch.setattr(os, "rename", rename)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _no_lock)
        with pytest.raises(RepositoryError, match=r"what it replaced cannot be put back \(Read-only file system\)"):
            recover(repository)
    assert recover(repository) == ["front", "front_model"]
    assert _tree(repository) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


def test_recover_keeps_an_unfinished_change_of_an_earlier_release(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    old = tmp_path / ".model_repository.x.staging"
    old.mkdir()
    (old / locks.JOURNAL).write_text('{"front": "a hash"}')
    with pytest.raises(RepositoryError, match="earlier version of build-repo that was killed: move what is in"):
        recover(repository)
    assert old.is_dir()


def test_concurrent_builds_into_one_repository_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each build becomes a version, and the last one is served."""
    repository = tmp_path / "model_repository"
    inside = threading.Lock()
    activate = versions_module.activate

    def slow(change: RepositoryChange, repository: Path, names: Sequence[str], number: int) -> None:
        assert inside.acquire(blocking=False), "two builds publish at once"
        time.sleep(0.02)
        activate(change, repository, names, number)
        inside.release()

    monkeypatch.setattr(publish_module, "activate", slow)
    with ThreadPoolExecutor(4) as builders:
        reports = list(builders.map(lambda content: _publish(repository, content), [b"one", b"two", b"three", b"four"]))
    assert sorted(report.version for report in reports) == [1, 2, 3, 4]
    assert loaded_numbers(repository / "front") == loaded_numbers(repository / "front_model") == [4]
    assert len(_contents(repository)) == 1
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
def test_publish_error_has_a_remedy(number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(publish_module, "sync", failing)
    with pytest.raises(RepositoryError, match=advice):
        _publish(tmp_path / "model_repository", b"one")


def test_publish_to_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    before = _tree(tmp_path)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish_module, "sync", full)
    with pytest.raises(RepositoryError, match="No space left on device"):
        _publish(repository, b"two")
    assert _tree(tmp_path) == before


def test_publish_refuses_an_output_that_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RepositoryError, match="could not be written"):
        _publish(tmp_path / "file" / "model_repository", b"one")


def test_recover_leaves_the_staging_of_a_running_build(tmp_path: Path) -> None:
    """The lock marks a running build; process ids in the folder names of earlier releases are ignored."""
    repository = tmp_path / "model_repository"
    repository.mkdir()
    dead = tmp_path / f".model_repository.{os.getppid()}.x.staging"
    dead.mkdir()
    with ThreadPoolExecutor(1) as other:
        with locks.locked(repository), locks.staging(repository) as staging:
            recovering = other.submit(recover, repository)
            time.sleep(0.05)
            assert staging.is_dir()
            assert dead.is_dir()
            assert not recovering.done()
        assert recovering.result(timeout=300) == []
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


def test_publish_takes_the_locks_that_nfs_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a staging folder itself was locked. NFS refuses exclusive locks of what is not open for writing."""
    flock = fcntl.flock

    def flock_on_nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_on_nfs)
    repository = tmp_path / "model_repository"
    _publish(repository, b"one")
    with locks.locked(repository), locks.staging(repository):
        assert locks.abandoned_staging(repository) == []
    assert [path.name for path in tmp_path.iterdir()] == ["model_repository"]

"""Publishing: written beside the repository, synced, checked, then moved in; never half a model.

All entries of one build change together, each in one exchange with what was there, so that none is ever missing. A
build that is interrupted leaves what was there: an exception rolls back at once, a killed process is rolled back by
the next `recover` (each build, check and serve begins with it). One at a time publishes or recovers: a lock says who.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from builder.errors import RepositoryError
from builder.report.bom import BOM, bom
from builder.report.page import PAGE, page
from builder.triton.check import check
from builder.triton.layout import RepositoryEntry
from builder.triton.render import render
from builder.verify.verdict import Unverified, Verified

JOURNAL = "journal.json"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)
FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def publish(repository: Path, made: Verified | Unverified) -> None:
    """Write its entries, each with the report as its build.json, and move them into `repository` together.

    The report lies beside the front model, the first entry, as a page too, and so does the bill of materials. Raises
    RepositoryError when the disk or the folder does not allow it; the repository is then as before.
    """
    if not isinstance(made, Verified | Unverified):
        raise TypeError(f"only Verified or Unverified entries are published, not {type(made).__name__}")
    beside = {PAGE: page(made.report).encode(), BOM: bom(made.report).encode()}
    entries = [replace(made.entries[0], files={**made.entries[0].files, **beside})]
    entries.extend(made.entries[1:])
    report = json.dumps(made.report.document(), indent=1, ensure_ascii=False).encode()
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with _alone(repository), _staging(repository) as staging:
            for entry in entries:
                _write(staging / "new" / entry.name, entry, report)
            problems = check(staging / "new")
            if problems:
                raise RepositoryError(f"the new model would not load: {problems[0]}. Nothing was published")
            names = [entry.name for entry in entries]
            left = _entries_of(repository, names[0]) - set(names)
            _swap(repository, staging, names)
            for name in left:
                os.rename(repository / name, staging / "old" / name)
    except OSError as error:
        raise RepositoryError(
            f"{repository} could not be written ({error.strerror or error}): nothing in it was changed. "
            f"{_what_to_do(error)}"
        ) from error


def _what_to_do(error: OSError) -> str:
    if error.errno in FULL:
        return "Free some space, or choose another folder with --output"
    if error.errno in FORBIDDEN:
        return "Let this user write to it and to the folder that it is in, or choose another one with --output"
    return "Choose another folder with --output"


def existing_source(repository: Path, name: str) -> str | None:
    """The checkpoint that the model `name` in `repository` was built from; None where there is no such model."""
    report = repository / name / "build.json"
    if not (repository / name).exists():
        return None
    try:
        return str(json.loads(report.read_text("utf-8"))["checkpoint"]["source"])
    except (OSError, ValueError, KeyError):
        return "something else than build-repo"


def _entries_of(repository: Path, name: str) -> set[str]:
    """The entries in `repository` of the build that `name` came of: an engine that this one has inside is left over."""
    try:
        files = json.loads((repository / name / "build.json").read_text("utf-8"))["files"]
        return {entry for entry in files if (repository / entry).is_dir()}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def recover(repository: Path) -> list[str]:
    """Finish what killed builds left beside `repository`: put back what they had moved away.

    Raises RepositoryError where that is not possible.
    """
    if not _left(repository):
        return []
    recovered: list[str] = []
    try:
        with _alone(repository):
            for staging in _left(repository):  # of builds that are over: one that runs holds the lock
                journal = _read_journal(staging / JOURNAL)
                _roll_back(repository, staging, journal)
                recovered.extend(journal)
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise RepositoryError(
            f"{repository}: a build was killed while it published, and what it replaced cannot be put back "
            f"({error.strerror or error}). {_what_to_do(error)}"
        ) from error
    return recovered


def _left(repository: Path) -> list[Path]:
    return sorted(repository.parent.glob(f".{repository.name}.*.staging"))


@contextlib.contextmanager
def _alone(repository: Path) -> Iterator[None]:
    """Hold the lock of `repository`, which a process that dies gives back; wait while another has it."""
    path = repository.parent / f".{repository.name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)  # whoever had it has removed the file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _staging(repository: Path) -> Iterator[Path]:
    """A folder on the repository's own file system, outside it: a running Triton never looks there.

    It stays where it holds what could not be put back.
    """
    place = tempfile.mkdtemp(prefix=f".{repository.name}.", suffix=".staging", dir=repository.parent)
    staging = Path(place)
    try:
        yield staging
    finally:
        if not (staging / JOURNAL).exists():
            shutil.rmtree(staging, ignore_errors=True)


def _write(folder: Path, entry: RepositoryEntry, report: bytes) -> None:
    contents = {
        **entry.files,
        "config.pbtxt": render(entry.config).encode(),
        "build.json": report,
    }
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)
        _sync(target)
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(repository: Path, staging: Path, names: Sequence[str]) -> None:
    """Let old and new entries change places; the journal says how to go back until all have.

    The last entry moves first and the first last, so that a front model never appears before its engine.
    Raises RepositoryError where it failed and what was there could not be put back at once.
    """
    (staging / "old").mkdir()
    journal = {name: _identity(staging / "new" / name) for name in names}
    _write_journal(staging / JOURNAL, journal)
    try:
        for name in reversed(names):
            _move_in(staging / "new" / name, repository / name, staging / "old" / name)
        _sync(repository)
    except BaseException as cause:
        try:
            _roll_back(repository, staging, journal)
        except OSError as error:
            raise RepositoryError(
                f"{repository} could not be written ({cause}), nor what was there put back ({error}): it is kept in "
                f"{staging}. When the cause is gone, put it back: build-repo check {repository}"
            ) from error
        os.unlink(staging / JOURNAL)
        raise
    os.unlink(staging / JOURNAL)


def _move_in(made: Path, target: Path, aside: Path) -> None:
    """Put `made` in the place of `target`: in one exchange, or in two renames where the file system has no other."""
    if not target.exists():
        os.rename(made, target)
    elif not _exchange(made, target):
        os.rename(target, aside)
        os.rename(made, target)


def _exchange(a: Path, b: Path) -> bool:
    """Let two paths change places in one step; False where the file system or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(b))


def _roll_back(repository: Path, staging: Path, journal: Mapping[str, str]) -> None:
    """Put back what `_move_in` moved of each entry; `journal`: what the new one is known by."""
    for name, identity in journal.items():
        target, made, aside = repository / name, staging / "new" / name, staging / "old" / name
        if aside.exists():
            if target.exists():
                os.rename(target, made)
            os.rename(aside, target)
        elif made.exists() and target.exists() and _identity(target) == identity:
            _exchange(made, target)
        elif not made.exists() and target.exists():
            os.rename(target, made)  # there was none before


def _identity(entry: Path) -> str:
    """What an entry is known by: its report, which has the hash of every file."""
    report = entry / "build.json"
    return hashlib.sha256(report.read_bytes()).hexdigest() if report.is_file() else ""


def _write_journal(path: Path, journal: Mapping[str, str]) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(journal), "utf-8")
    _sync(unfinished)
    os.replace(unfinished, path)
    _sync(path.parent)


def _read_journal(path: Path) -> dict[str, str]:
    """Nothing where there is none, or an empty one: nothing is moved before it is there."""
    try:
        names = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return dict(names) if isinstance(names, dict) else dict.fromkeys(names, "")  # as it was once written

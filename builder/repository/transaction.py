"""Transactions on a repository: a change is made as a whole or not at all, even if the process dies.

The journal records each step, with how to undo it, before the step is made. An exception undoes a change at once; that
of a killed process is undone by the next `recover` (each build, check and serve begins with it). A lock lets one
process at a time change or recover a repository. Long work, such as trying a version, holds the lock of its model
alone. Knows files; knows nothing of models.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.common.workplace import FULL

JOURNAL = "journal.json"
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Step:
    """One step: what is at `target` came from `source`. Paths are relative to the folder that the repository is in.

    `kind`: "move" or "write". Of a write, `source` is a copy of the earlier content of `target`; None if there was
    none.
    """

    kind: str
    source: str | None
    target: str


class Change:
    """A change in progress. `staging`: a folder on the repository's own file system, outside it."""

    def __init__(self, repository: Path, staging: Path) -> None:
        self.root, self.staging = repository.parent, staging
        self.steps: list[Step] = []
        self._note()

    def move(self, source: Path, target: Path) -> None:
        """Rename a file or a folder to a path where nothing exists."""
        target.parent.mkdir(exist_ok=True)
        self._note(Step("move", self._place(source), self._place(target)))
        os.rename(source, target)
        sync(target.parent)

    def write(self, content: bytes, target: Path) -> None:
        """Replace `target` with a file of `content`, in one rename."""
        if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
            return
        path = self._next("written")
        _fill(path, content)
        self._replace(path, target)

    def write_at_once(self, contents: Mapping[Path, bytes], folder: Path) -> None:
        """Replace several files, all at the same moment. `folder`: a path in the repository that is used meanwhile."""
        if folder.exists():
            self._end_switch(folder)
        if len(contents) > 1:
            self._switch_links(contents, folder)
        for target, content in contents.items():
            self.write(content, target)
        if len(contents) > 1:
            self.move(folder, self._next("together"))

    def _switch_links(self, contents: Mapping[Path, bytes], folder: Path) -> None:
        """Replace the files with symbolic links that change together, when one link is renamed.

        Two files cannot share a rename. So they become links that go through one link, `folder`/now: to their earlier
        content until its rename, and then to `contents`.
        """
        made = self._next("together")
        _fill_folder(made / "before", [target.read_bytes() for target in contents])
        _fill_folder(made / "after", list(contents.values()))
        self._first_link(made / "now", "before")
        sync(made)
        self.move(made, folder)
        for index, target in enumerate(contents):
            self._link(os.path.relpath(folder / "now" / str(index), target.parent), target)
        self._link("after", folder / "now")

    def _first_link(self, path: Path, to: str) -> None:
        """Create the first symbolic link.

        Raises RepositoryError if the file system has no symbolic links: exFAT, some network folders.
        """
        try:
            path.symlink_to(to)
        except OSError as error:
            if error.errno not in LINKLESS:
                raise
            raise RepositoryError(
                f"The file system of {self.root} has no symbolic links ({error.strerror}), and a front and an engine "
                "that change at once need them: nothing was changed. Put the repository on another one"
            ) from error

    def _end_switch(self, folder: Path) -> None:
        """Turn the links that an interrupted switch left into plain files.

        A repository that was copied or restored in the middle of a switch has them.
        """
        for path in folder.parent.parent.glob("*/*"):
            if path.is_symlink() and folder.resolve() in path.resolve().parents:
                self.write(path.read_bytes(), path)
        self.move(folder, self._next("left"))

    def undo(self) -> None:
        """Put everything back."""
        undo(self.root, self.steps)
        self.commit()

    def commit(self) -> None:
        """Make the change final: nothing is undone from here on."""
        self.steps = []
        (self.staging / JOURNAL).unlink(missing_ok=True)

    def _link(self, to: str, target: Path) -> None:
        path = self._next("link")
        path.symlink_to(to)
        self._replace(path, target)

    def _replace(self, path: Path, target: Path) -> None:
        """Replace `target` with a file or a link of the staging folder."""
        before = self._next("before") if os.path.lexists(target) else None
        if before is not None:
            shutil.copyfile(target, before, follow_symlinks=False)
            if not before.is_symlink():
                sync(before)
        self._note(Step("write", None if before is None else self._place(before), self._place(target)))
        os.replace(path, target)
        sync(target.parent)

    def _next(self, kind: str) -> Path:
        """Return a path in the staging folder for the next step."""
        return self.staging / f"{kind}_{len(self.steps)}"

    def _place(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _note(self, *steps: Step) -> None:
        self.steps.extend(steps)
        unfinished = self.staging / f"{JOURNAL}.unfinished"
        unfinished.write_text(json.dumps([asdict(step) for step in self.steps]), "utf-8")
        sync(unfinished)
        os.replace(unfinished, self.staging / JOURNAL)
        sync(self.staging)


def _fill_folder(folder: Path, contents: Sequence[bytes]) -> None:
    """Create a folder of files whose names are their indices."""
    folder.mkdir(parents=True)
    for index, content in enumerate(contents):
        _fill(folder / str(index), content)
    sync(folder)


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def undo(root: Path, steps: Sequence[Step]) -> None:
    """Put everything back, the last step first. Steps that a killed process had already undone are left alone."""
    for step in reversed(steps):
        target = root / step.target
        source = None if step.source is None else root / step.source
        if source is None:
            target.unlink(missing_ok=True)
        elif step.kind == "move" and target.exists() and not source.exists():
            os.rename(target, source)
        elif step.kind == "write" and os.path.lexists(source):
            os.replace(source, target)


@contextlib.contextmanager
def changing(repository: Path, *names: str) -> Iterator[Change]:
    """Yield a change of the models `names` of `repository`; after the block all of it is made, or none.

    Waits for processes that change the repository or hold the lock of one of these models. Raises RepositoryError if
    the disk or the folder does not allow it; the repository is then as before.
    """
    with contextlib.ExitStack() as stack, _told(repository):
        for name in sorted(names):
            stack.enter_context(_locked(repository, name))
        stack.enter_context(_locked(repository))
        change = Change(repository, stack.enter_context(staging(repository)))
        try:
            yield change
        except BaseException as cause:
            _undo(repository, change, cause)
            raise
        change.commit()


@contextlib.contextmanager
def visiting(repository: Path, guest: str, make: Callable[[Path], None]) -> Iterator[None]:
    """Keep an entry `guest`, which `make` fills, in `repository` for the block.

    Other processes may change the repository meanwhile. `recover` removes the guest of a process that was killed.
    Raises RepositoryError.
    """
    if (repository / guest).exists():
        raise RepositoryError(f"{repository} has a model {guest} of its own, a name that is needed: remove it first")
    with contextlib.ExitStack() as stack:
        with _told(repository), _locked(repository):
            change = Change(repository, stack.enter_context(staging(repository)))
        try:
            with _told(repository), _locked(repository):
                make(change.staging / guest)
                change.move(change.staging / guest, repository / guest)
            yield
        finally:
            with _told(repository), _locked(repository):
                change.undo()


@contextlib.contextmanager
def _told(folder: Path, nothing: str = "nothing in it") -> Iterator[None]:
    """Turn an OSError into a RepositoryError that says what to do, and that `nothing` was changed in `folder`."""
    try:
        yield
    except OSError as error:
        raise RepositoryError(
            f"{folder} could not be written ({error.strerror or error}): {nothing} was changed. {what_to_do(error)}"
        ) from error


def _undo(repository: Path, change: Change, cause: BaseException) -> None:
    try:
        change.undo()
    except OSError as error:
        raise RepositoryError(
            f"{repository} could not be written ({cause}), nor what was there put back ({error}): it is kept in "
            f"{change.staging}. When the cause is gone, put it back: build-repo check {repository}"
        ) from error


def recover(repository: Path) -> list[str]:
    """Undo what killed processes left half done in `repository`; return the models that they had begun to change.

    Raises RepositoryError if that is impossible.
    """
    if not _left(repository):
        return []
    recovered: list[str] = []
    try:
        with _locked(repository):
            for folder in _left(repository):
                steps = _read_journal(folder / JOURNAL)
                undo(repository.parent, steps)
                recovered.extend(_changed(repository, step) for step in steps)
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise RepositoryError(
            f"{repository}: a build was killed while it published, and what it replaced cannot be put back "
            f"({error.strerror or error}). {what_to_do(error)}"
        ) from error
    return sorted(set(recovered))


def _changed(repository: Path, step: Step) -> str:
    """Return the model that a step has changed: it put something into the repository, or took it out."""
    folder, model, *_ = Path(step.target).parts
    return model if folder == repository.name or step.source is None else Path(step.source).parts[1]


def _left(repository: Path) -> list[Path]:
    """Return the staging folders whose process has ended: it held a lock on each."""
    return [folder for folder in sorted(repository.parent.glob(f".{repository.name}.*.staging")) if not _held(folder)]


def _held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True  # it is being removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def alone(repository: Path, *name: str) -> Iterator[None]:
    """Hold the lock of `repository`, or of one model of it, for the block; wait while another process has it.

    A process that dies releases it. Take a model's lock before the repository's. Raises RepositoryError if the folder
    does not allow it.
    """
    with contextlib.ExitStack() as stack:
        with _told(repository.parent, "nothing"):
            stack.enter_context(_locked(repository, *name))
        yield


@contextlib.contextmanager
def _locked(repository: Path, *name: str) -> Iterator[None]:
    """Hold the lock like `alone`, but let an OSError through, for callers that explain it themselves."""
    path = repository.parent / ".".join(["", repository.name, *name, "lock"])
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)  # its former holder has removed the file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """Yield a folder on the repository's own file system, outside it: a running Triton never looks there.

    It stays if it holds files that could not be put back.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{repository.name}.", suffix=".staging", dir=repository.parent))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # so that `recover` leaves the folder alone
        yield folder
    finally:
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def refuse_unwritable(repository: Path) -> None:
    """Raise RepositoryError if `repository` cannot be changed; the trial leaves nothing behind.

    A change is staged in the folder that contains the repository, or in the nearest parent that exists so far.
    """
    try:
        if os.path.lexists(repository) and not (repository.is_dir() and os.access(repository, os.W_OK | os.X_OK)):
            raise PermissionError(errno.EACCES, "not a folder that can be written", str(repository))
        place = next(parent for parent in repository.absolute().parents if os.path.lexists(parent))
        with tempfile.TemporaryDirectory(prefix=f".{repository.name}.", suffix=".trial", dir=place):
            pass
    except OSError as error:
        raise RepositoryError(
            f"{repository} could not be written ({error.strerror or error}). {what_to_do(error)}"
        ) from error


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def what_to_do(error: OSError) -> str:
    """Return what the user can do about the error."""
    if error.errno in FULL:
        return "Free some space, or choose another folder"
    if error.errno in FORBIDDEN:
        return "Let this user write to it and to the folder that it is in, or choose another one"
    return "Choose another folder"


def _read_journal(path: Path) -> list[Step]:
    """Read the steps of a journal; none if it is missing or empty, for each step is journalled before it is made."""
    try:
        return [Step(**step) for step in json.loads(path.read_text("utf-8"))]
    except (FileNotFoundError, ValueError):
        return []
    except TypeError as error:
        raise RepositoryError(
            f"{path} was left by a build of an earlier version of build-repo that was killed: move what is in "
            f"{path.parent / 'old'} back, and remove {path.parent}"
        ) from error

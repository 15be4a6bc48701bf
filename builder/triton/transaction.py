"""Changing a repository: all of a change or nothing of it, whatever happens and whenever.

Each step is written down before it is made, with how to undo it. An exception undoes a change at once; that of a
killed process is undone by the next `recover` (each build, check and serve begins with it). One at a time changes or
recovers a repository: a lock says who. What takes long, such as a version that is tried, holds that of its model alone.
Knows files; knows nothing of models.
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

from builder.errors import RepositoryError
from builder.workplace import FULL

JOURNAL = "journal.json"
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Step:
    """One step: what is at `target` came from `source`. Paths are relative to the folder that the repository is in.

    `kind`: "move" or "write"; of what was written, `source` is what was there before, None where nothing was.
    """

    kind: str
    source: str | None
    target: str


class Change:
    """A change that is being made. `staging`: a folder on the repository's own file system, outside of it."""

    def __init__(self, repository: Path, staging: Path) -> None:
        self.root, self.staging = repository.parent, staging
        self.steps: list[Step] = []
        self._note()

    def move(self, source: Path, target: Path) -> None:
        """Rename a file or a folder to where nothing is."""
        target.parent.mkdir(exist_ok=True)
        self._note(Step("move", self._place(source), self._place(target)))
        os.rename(source, target)
        sync(target.parent)

    def write(self, content: bytes, target: Path) -> None:
        """Put a file of `content` in the place of `target`, in one rename."""
        if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
            return
        path = self._next("written")
        _fill(path, content)
        self._replace(path, target)

    def write_at_once(self, contents: Mapping[Path, bytes], folder: Path) -> None:
        """Put files in the places of others, all at the same moment. `folder`: of the repository, until then."""
        if folder.exists():
            self._end_switch(folder)
        if len(contents) > 1:
            self._switch_links(contents, folder)
        for target, content in contents.items():
            self.write(content, target)
        if len(contents) > 1:
            self.move(folder, self._next("together"))

    def _switch_links(self, contents: Mapping[Path, bytes], folder: Path) -> None:
        """Two files have no rename in common. So they become links that go through one link, `folder`/now: to what they
        held before, until its rename, and then to `contents`."""
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
        """Raises RepositoryError where the file system has no symbolic links: exFAT, some network folders."""
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
        """A repository that was copied, or restored, in the midst of such a change: its links become plain files."""
        for path in folder.parent.parent.glob("*/*"):
            if path.is_symlink() and folder.resolve() in path.resolve().parents:
                self.write(path.read_bytes(), path)
        self.move(folder, self._next("left"))

    def undo(self) -> None:
        """Put everything back."""
        undo(self.root, self.steps)
        self.commit()

    def commit(self) -> None:
        """Nothing is undone from here on."""
        self.steps = []
        (self.staging / JOURNAL).unlink(missing_ok=True)

    def _link(self, to: str, target: Path) -> None:
        path = self._next("link")
        path.symlink_to(to)
        self._replace(path, target)

    def _replace(self, path: Path, target: Path) -> None:
        """Put a file, or a link, of the staging folder in the place of `target`."""
        before = self._next("before") if os.path.lexists(target) else None
        if before is not None:
            shutil.copyfile(target, before, follow_symlinks=False)
            if not before.is_symlink():
                sync(before)
        self._note(Step("write", None if before is None else self._place(before), self._place(target)))
        os.replace(path, target)
        sync(target.parent)

    def _next(self, kind: str) -> Path:
        """What belongs to the next step, in the staging folder."""
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
    """A folder of files whose names are their places."""
    folder.mkdir(parents=True)
    for index, content in enumerate(contents):
        _fill(folder / str(index), content)
    sync(folder)


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def undo(root: Path, steps: Sequence[Step]) -> None:
    """Put everything back, the last step first; what a killed process had put back already is left as it is."""
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
    """A change of the models `names` of `repository`, alone: all of it is there after the block, or nothing of it.

    It waits for who changes the repository, or has one of these models to itself. Raises RepositoryError where the
    disk or the folder does not allow it; the repository is then as before.
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
    """An entry `guest` of `repository`, which `make` fills, in the block and not after it; others change the repository
    meanwhile. `recover` takes out that of a process that was killed. Raises RepositoryError."""
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
    """What the disk or `folder` does not allow, as RepositoryError with what to do; `nothing` was changed."""
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
    """Undo what killed processes left half done in `repository`; the models that they had begun to change.

    Raises RepositoryError where that is not possible.
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
    """The model that a step has changed: it put something into the repository, or took it out."""
    folder, model, *_ = Path(step.target).parts
    return model if folder == repository.name or step.source is None else Path(step.source).parts[1]


def _left(repository: Path) -> list[Path]:
    """The staging folders whose process is over: it held a lock on each."""
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
    """Hold the lock of `repository`, or of one model of it; wait while another has it. A process that dies gives it
    back. Take a model's lock before the repository's. Raises RepositoryError where the folder does not allow it."""
    with contextlib.ExitStack() as stack:
        with _told(repository.parent, "nothing"):
            stack.enter_context(_locked(repository, *name))
        yield


@contextlib.contextmanager
def _locked(repository: Path, *name: str) -> Iterator[None]:
    """`alone`, for who says itself what an OSError means."""
    path = repository.parent / ".".join(["", repository.name, *name, "lock"])
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
def staging(repository: Path) -> Iterator[Path]:
    """A folder on the repository's own file system, outside it: a running Triton never looks there.

    It stays where it holds what could not be put back.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{repository.name}.", suffix=".staging", dir=repository.parent))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # `recover` leaves it alone
        yield folder
    finally:
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def refuse_unwritable(repository: Path) -> None:
    """Raise RepositoryError where a change of `repository` could not be made; nothing is left there by the trial.

    A change is staged in the folder that the repository is in, or that of its parents that exists so far.
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
    """Have a file, or a folder's list of files, on the disk before what comes next."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def what_to_do(error: OSError) -> str:
    """What the user can do about it."""
    if error.errno in FULL:
        return "Free some space, or choose another folder"
    if error.errno in FORBIDDEN:
        return "Let this user write to it and to the folder that it is in, or choose another one"
    return "Choose another folder"


def _read_journal(path: Path) -> list[Step]:
    """Nothing where there is none, or an empty one: no step is made before it is written down."""
    try:
        return [Step(**step) for step in json.loads(path.read_text("utf-8"))]
    except (FileNotFoundError, ValueError):
        return []
    except TypeError as error:
        raise RepositoryError(
            f"{path} was left by a build of an earlier version of build-repo that was killed: move what is in "
            f"{path.parent / 'old'} back, and remove {path.parent}"
        ) from error

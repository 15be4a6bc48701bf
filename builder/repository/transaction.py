"""Transactions on a repository: a change is made as a whole or not at all, even if the process dies.

The journal records each step, with how to undo it, before the step is taken. An exception undoes a change at once. The
next `recover`, with which each build, check and serve begins, undoes the change of a killed process. A lock lets one
process at a time change or recover a repository; long work, such as trying a version, holds only the lock of its model.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder.common.errors import RepositoryError
from builder.repository.locks import (
    JOURNAL,
    abandoned_staging,
    explain_os_errors,
    hold_lock,
    staging,
    sync,
    what_to_do,
    write_synced,
)

LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class JournalStep:
    """One step: `target` has come from `source`. Paths are relative to the folder that contains the repository.

    `kind`: "move" or "write". The `source` of a write is a copy of the earlier content of `target`; None without one.
    """

    kind: str
    source: str | None
    target: str


class RepositoryChange:
    """A change in progress. `staging`: a folder on the repository's own file system, outside it."""

    def __init__(self, repository: Path, staging: Path) -> None:
        self.root, self.staging = repository.parent, staging
        self.steps: list[JournalStep] = []
        self._record()
        sync(staging)

    def move(self, source: Path, target: Path) -> None:
        """Rename a file or a folder to a path where nothing exists."""
        target.parent.mkdir(exist_ok=True)
        self._record(JournalStep("move", self._relative(source), self._relative(target)))
        os.rename(source, target)
        sync(target.parent)

    def write(self, content: bytes, target: Path) -> None:
        """Replace `target` with a file of `content`, in one rename."""
        if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
            return
        path = self._next("written")
        write_synced(path, content)
        self._replace(path, target)

    def write_at_once(self, contents: Mapping[Path, bytes], folder: Path) -> None:
        """Replace several files in one moment. `folder`: a path in the repository to use meanwhile."""
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
        staged = self._next("together")
        for index, (target, content) in enumerate(contents.items()):
            write_synced(staged / "before" / str(index), target.read_bytes())
            write_synced(staged / "after" / str(index), content)
        self._first_link(staged / "now", "before")
        for part in (staged / "before", staged / "after", staged):
            sync(part)
        self.move(staged, folder)
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
        """Turn the links of an interrupted switch into plain files: a copy made in the middle of a switch has them."""
        for path in folder.parent.parent.glob("*/*"):
            if path.is_symlink() and folder.resolve() in path.resolve().parents:
                self.write(path.read_bytes(), path)
        self.move(folder, self._next("interrupted"))

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
        self._record(JournalStep("write", None if before is None else self._relative(before), self._relative(target)))
        os.replace(path, target)
        sync(target.parent)

    def _next(self, kind: str) -> Path:
        """Return a path in the staging folder for the next step."""
        return self.staging / f"{kind}_{len(self.steps)}"

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _record(self, *steps: JournalStep) -> None:
        """Append steps to the journal, and flush it to the disk: its cost does not grow with the steps before."""
        self.steps.extend(steps)
        with (self.staging / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.writelines(f"{json.dumps(asdict(step))}\n" for step in steps)
        sync(self.staging / JOURNAL)


def undo(root: Path, steps: Sequence[JournalStep]) -> None:
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
def changing(repository: Path, *names: str) -> Iterator[RepositoryChange]:
    """Yield a change of the models `names` of `repository`; after the block all of it is done, or nothing.

    Waits for processes that change the repository or hold the lock of one of these models. Raises RepositoryError if
    the disk or the folder does not allow it; the repository is then as before.
    """
    with contextlib.ExitStack() as stack, explain_os_errors(repository):
        for name in sorted(names):
            stack.enter_context(hold_lock(repository, name))
        stack.enter_context(hold_lock(repository))
        change = RepositoryChange(repository, stack.enter_context(staging(repository)))
        try:
            yield change
        except BaseException as cause:
            try:
                change.undo()
            except OSError as error:
                raise RepositoryError(
                    f"{repository} could not be written ({cause}), nor what was there put back ({error}): it is kept "
                    f"in {change.staging}. When the cause is gone, put it back: build-repo check {repository}"
                ) from error
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
        with explain_os_errors(repository), hold_lock(repository):
            change = RepositoryChange(repository, stack.enter_context(staging(repository)))
        try:
            with explain_os_errors(repository), hold_lock(repository):
                make(change.staging / guest)
                change.move(change.staging / guest, repository / guest)
            yield
        finally:
            with explain_os_errors(repository), hold_lock(repository):
                change.undo()


def recover(repository: Path) -> list[str]:
    """Undo the unfinished changes of killed processes in `repository`; return the models that they were changing.

    Raises RepositoryError if that is impossible.
    """
    if not abandoned_staging(repository):
        return []
    recovered: list[str] = []
    try:
        with hold_lock(repository):
            for folder in abandoned_staging(repository):
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


def _changed(repository: Path, step: JournalStep) -> str:
    """Return the model that a step put something into, or took something out of."""
    folder, model, *_ = Path(step.target).parts
    is_in_repository = folder == repository.name and not model.startswith(".")  # not in the staging folder of a mount
    return model if is_in_repository or step.source is None else Path(step.source).parts[1]


def _read_journal(path: Path) -> list[JournalStep]:
    """Read the steps of a journal, one a line, or all in one line as build-repo 0.4 wrote them; none if it is missing.

    A line that is cut is the last one: its step was not taken.
    """
    documents: list[Any] = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in path.read_text("utf-8").splitlines():
            document = json.loads(line)
            documents.extend(document if isinstance(document, list) else [document])
    try:
        return [JournalStep(**document) for document in documents]
    except TypeError as error:
        raise RepositoryError(
            f"{path} was left by a build of an earlier version of build-repo that was killed: move what is in "
            f"{path.parent / 'old'} back, and remove {path.parent}"
        ) from error

"""Locks and staging folders of a repository, and advice on a disk or a folder that refuses a change.

They lie beside the repository or, if it is a mount of its own, in it: files move by renaming, which works within one
file system, and the folder beside a mount may not be writable. A process holds a lock on each of its staging folders,
so that the folder of a killed process is recognised. Take a model's lock before the repository's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.common.files import lock_file
from builder.common.workplace import DISK_FULL_ERRNOS

JOURNAL = "journal.json"  # of a change, in its staging folder
RUNNING = "running"  # beside it, locked by its process: NFS locks no folders, and only what is open for writing
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def locked(repository: Path, *name: str) -> Iterator[None]:
    """Hold the lock of `repository`, or of one model of it, for the block; wait while another process has it.

    A process that dies releases it. Raises RepositoryError if the folder does not allow a lock.
    """
    with contextlib.ExitStack() as stack:
        with explain_os_errors(repository.parent, "nothing"):
            stack.enter_context(hold_lock(repository, *name))
        yield


@contextlib.contextmanager
def hold_lock(repository: Path, *name: str) -> Iterator[None]:
    """Hold the lock like `locked`, but let an OSError through."""
    with lock_file(workspace(repository) / ".".join(["", repository.name, *name, "lock"])):
        yield


def workspace(repository: Path) -> Path:
    """Return the folder for the locks and the staging folders of a repository."""
    return repository if os.path.ismount(repository) else repository.parent


@contextlib.contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """Yield a folder on the repository's own file system, outside it unless it is a mount: Triton does not look there.

    It stays if it holds files that could not be put back.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{repository.name}.", suffix=".staging", dir=workspace(repository)))
    descriptor = os.open(folder / RUNNING, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as long as this process lives
        yield folder
    finally:
        os.close(descriptor)  # first: NFS keeps a file that is open
        if not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)


def abandoned_staging(repository: Path) -> list[Path]:
    """Return the staging folders whose process has ended."""
    folders = sorted(workspace(repository).glob(f".{repository.name}.*.staging"))
    return [folder for folder in folders if not _is_locked(folder)]


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / RUNNING, os.O_RDONLY)
    except FileNotFoundError:
        return not folder.is_dir()  # it is being removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # which a reader may have, too
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def refuse_unwritable(repository: Path) -> None:
    """Raise RepositoryError if `repository` cannot be changed; the attempt leaves nothing behind.

    A change is staged in the folder that contains the repository, or in the nearest parent that exists so far; of a
    mount, in itself.
    """
    try:
        if os.path.lexists(repository) and not (repository.is_dir() and os.access(repository, os.W_OK | os.X_OK)):
            raise PermissionError(errno.EACCES, "not a folder that can be written", str(repository))
        folders = (workspace(repository.absolute()), *repository.absolute().parents)
        existing = next(folder for folder in folders if os.path.lexists(folder))
        with tempfile.TemporaryDirectory(prefix=f".{repository.name}.", suffix=".trial", dir=existing):
            pass
    except OSError as error:
        raise RepositoryError(
            f"{repository} could not be written ({error.strerror or error}). {what_to_do(error)}"
        ) from error


@contextlib.contextmanager
def explain_os_errors(folder: Path, nothing: str = "nothing in it") -> Iterator[None]:
    """Raise an OSError as a RepositoryError with advice; it says that `nothing` was changed in `folder`."""
    try:
        yield
    except OSError as error:
        raise RepositoryError(
            f"{folder} could not be written ({error.strerror or error}): {nothing} was changed. {what_to_do(error)}"
        ) from error


def what_to_do(error: OSError) -> str:
    """Return advice on the error."""
    if error.errno in DISK_FULL_ERRNOS:
        return "Free some space, or choose another folder"
    if error.errno in FORBIDDEN:
        return "Let this user write to it and to the folder that it is in, or choose another one"
    return "Choose another folder"


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, with the folders that it lacks, and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Temporary folders: of a build's files until they are published, on a disk that may be full, and of servers.

Each writer reports a full disk in its own way: Python by an errno, libraries in C++ by the system's words for it, and
tempfile by finding no folder at all. A process that is killed leaves its folder, whose lock is then free, and the next
one removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from builder.common.errors import RepositoryError

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
PREFIX = "build-repo-work-"
MIN_AGE_S = 60.0  # a younger folder may be of a process that is about to lock it
DISK_FULL_MESSAGES = (*map(os.strerror, DISK_FULL_ERRNOS), "No usable temporary directory")


@contextmanager
def build_folder() -> Iterator[Path]:
    """Yield a folder for the block alone. Raises RepositoryError if its disk is full; other errors pass."""
    try:
        with temporary_folder() as folder:
            yield folder
    except Exception as error:
        reason = find_disk_full_error(error)
        if reason is None or (isinstance(error, RepositoryError) and PREFIX not in str(error)):
            raise  # a RepositoryError names the full disk itself, unless it is the one of this folder
        text = " ".join(str(reason).split())[:300]
        if isinstance(reason, OSError) and reason.filename is not None and PREFIX not in str(reason.filename):
            raise RepositoryError(f"a disk is full ({text}): free some space there") from error
        raise RepositoryError(
            f"the files of the build do not fit on the disk ({text}). Free some space, or have them on another disk: "
            "set TMPDIR to a folder there"
        ) from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder for the block alone; if this process is killed, a later one removes it."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, _locked(Path(folder)):
        yield Path(folder)


def require_disk_space(needed: int, files: str) -> None:
    """Raise RepositoryError if temporary `files` of `needed` bytes do not fit on the disk, before they are made.

    `files`: their description, in words.
    """
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RepositoryError(
            f"{files} take about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {place}. Free some space, "
            "or have them on another disk: set TMPDIR to a folder there"
        )


def remove_abandoned(parent: Path) -> None:
    """Remove the folders that killed processes left in `parent`."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or its process has just ended
            if time.time() - folder.stat().st_mtime > MIN_AGE_S:
                with _locked(folder) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock `folder` for the block, as far as this process lives; yield True if the lock was taken."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # to open a pipe would wait for its writer
    is_locked = False
    try:
        with suppress(OSError):  # another process has locked it, or it is on NFS, which locks no folder
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked
    finally:
        os.close(descriptor)


def find_disk_full_error(error: BaseException) -> BaseException | None:
    """Return the error that says a disk is full, `error` or a cause of it, by errno before words; or None."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None:
        chain.append(following)
        following = following.__cause__ or following.__context__
    by_number = (one for one in chain if isinstance(one, OSError) and one.errno in DISK_FULL_ERRNOS)
    by_words = (one for one in chain if any(words in str(one) for words in DISK_FULL_MESSAGES))
    return next(by_number, None) or next(by_words, None)

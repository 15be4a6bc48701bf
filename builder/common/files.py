"""Write a file, also atomically, link one content under many names, and lock by a file.

A linked file is never written in place: it is replaced by one that was written beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from builder.common.errors import RepositoryError

FICLONE = 0x40049409  # _IOW(0x94, 9, int) of linux/fs.h: ioctl_ficlone(2)


def write_output(path: Path, text: str, advice: str) -> None:
    """Write a file that the user asked for. Raises RepositoryError, whose message ends with `advice`."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise RepositoryError(f"{path} cannot be written ({error.strerror}); {advice}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: concurrent readers and writers see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def link(source: Path, target: Path) -> str:
    """Give `target`, which must not exist, the content of `source`. Returns the method: link, reflink or copy.

    Raises OSError.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, too many links, or links forbidden
        return clone(source, target)
    return "link"


def clone(source: Path, target: Path) -> str:
    """Copy to a file of its own, whose blocks are shared until one of the two is written. Raises OSError.

    Returns the method: reflink or copy.
    """
    with source.open("rb") as held, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, held.fileno())
        except OSError:  # not on this file system, or not across two
            shutil.copyfileobj(held, copy, 1 << 22)
            return "copy"
    return "reflink"


@contextlib.contextmanager
def lock_file(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock `path` for the block; wait while another process or thread has it, after a call of `on_wait`.

    The file exists only meanwhile, and a process that dies releases it. Raises OSError.
    """
    descriptor = _lock(path, on_wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, on_wait: Callable[[], None]) -> int:
    """Return a descriptor of the file `path` that has its lock. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its former holder has removed the file

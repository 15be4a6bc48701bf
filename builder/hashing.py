"""SHA-256 of files, which are read a piece at a time: a graph of gigabytes never lies in memory for its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

LARGE = 1 << 20  # bytes of a file that is not read twice
_known: dict[tuple[int, ...], str] = {}  # by device, inode, size and time of the last write


def sha256_of(*files: Path) -> str:
    """SHA-256 of the contents of `files`, one after the other, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def sha256_once(file: Path) -> str:
    """The same of one file. A large one is read once by this process while nobody writes into it, by whatever name.

    Raises OSError.
    """
    stat = file.stat()
    if stat.st_size < LARGE:
        return sha256_of(file)
    state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if state not in _known:
        _known[state] = sha256_of(file)
    return _known[state]

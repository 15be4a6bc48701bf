"""SHA-256 of files, which are read a piece at a time: a graph of gigabytes is never in memory for its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

MIN_CACHED_BYTES = 1 << 20  # bytes of a file that is not read twice


def sha256_of(*files: Path) -> str:
    """Return the SHA-256 of the contents of `files`, one after the other, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


class FileDigests:
    """SHA-256 of files; a large one is read once, under any of its names.

    A later write that keeps the file's size and time is not seen: keep an instance only as long as no other process
    writes, for one look at a repository, or for the files of one build.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}  # by device, inode, size and time of the last write

    def of(self, file: Path) -> str:
        """Return the SHA-256 of the contents of `file`, in hexadecimal. Raises OSError."""
        stat = file.stat()
        if stat.st_size < MIN_CACHED_BYTES:
            return sha256_of(file)
        state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if state not in self._known:
            self._known[state] = sha256_of(file)
        return self._known[state]


WRITTEN_DIGESTS = FileDigests()  # of files that builds of this process wrote

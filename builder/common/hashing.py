"""SHA-256 of files, which are read a piece at a time, and cached: a file of gigabytes is not read again unchanged."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from builder.common.cache.folder import cache_home
from builder.common.files import write_atomically

MIN_CACHED_BYTES = 1 << 20  # fewer bytes are read faster than their cached digest
MIN_AGE_S = 2.0  # since a file's last change: a later one within the clock's own steps would not show


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


def digest_of(files: Sequence[Path]) -> str:
    """Return `sha256_of` the files, cached on disk by their sizes, times and inodes. Raises OSError."""
    stats = [file.stat() for file in files]
    if sum(stat.st_size for stat in stats) < MIN_CACHED_BYTES:
        return sha256_of(*files)
    named = hashlib.sha256("\0".join(str(file.resolve()) for file in files).encode()).hexdigest()
    known = cache_home() / "digests" / f"{named[:32]}.json"
    now = [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev] for stat in stats]
    with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged file counts as missing
        remembered = json.loads(known.read_text("utf-8"))
        if remembered["files"] == now:
            return str(remembered["sha256"])
    digest = sha256_of(*files)
    if time.time() - max(max(stat.st_mtime, stat.st_ctime) for stat in stats) > MIN_AGE_S:
        with suppress(OSError):  # a full or read-only disk
            write_atomically(known, json.dumps({"files": now, "sha256": digest}).encode())
    return digest

"""SHA-256 of files, cached by size, times and inode: a file of gigabytes that did not change is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from builder.common.cache.folder import cache_home
from builder.common.hashing import sha256_of

MIN_CACHED_BYTES = 1 << 20  # fewer bytes are read faster than their cached digest
MIN_AGE_S = 2.0  # since a file's last change: a later one within the clock's own steps would not show


def digest_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the contents of `files`, one after the other, in hexadecimal. Raises OSError."""
    stats = [file.stat() for file in files]
    if sum(stat.st_size for stat in stats) < MIN_CACHED_BYTES:
        return sha256_of(*files)
    known = cache_home() / "digests" / f"{_named([str(file.resolve()) for file in files])}.json"
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


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: concurrent readers and writers see all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _named(facts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]

"""Packages fetched from an index to run here: engines of Triton releases, perf_analyzer.

Each is a folder of its own, whole or not there. Knows no stage of a build.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from builder.common.cache.folder import cache_home, folder_size

ENGINES, PROGRAMS = "runtimes", "programs"
IN_USE_S = 3600  # since the last use: a build or a load test may be running it


def fetched_folder(kind: str, name: str) -> Path:
    """Return the folder of `name` among `kind`, ENGINES or PROGRAMS, and mark it as used now; it may be absent."""
    folder = cache_home() / kind / name
    with suppress(OSError):
        os.utime(folder)
    return folder


def prune_fetched(max_bytes: int) -> tuple[list[str], int]:
    """Remove the least recently used folders until the rest fits into `max_bytes`; those that may be in use stay.

    Returns the names of the removed folders, and the bytes that are left of `max_bytes`, 0 if none are.
    """
    removed = []
    for folder in sorted(_fetched_folders(), key=_last_used, reverse=True):
        size = folder_size(folder)
        if size <= max_bytes or time.time() - _last_used(folder) < IN_USE_S:
            max_bytes = max(0, max_bytes - size)
        else:
            max_bytes = 0  # older ones go too
            _remove(folder)
            removed.append(folder.name)
    return removed, max_bytes


def _fetched_folders() -> list[Path]:
    return [path for kind in (ENGINES, PROGRAMS) for path in (cache_home() / kind).glob("*") if path.is_dir()]


def _last_used(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0


def _remove(folder: Path) -> None:
    """Remove `folder` atomically: no process sees a part of it."""
    with suppress(FileNotFoundError), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        folder.rename(Path(scratch, folder.name))

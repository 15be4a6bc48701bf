"""Bound of the disk space for stages: after each build the least recently used ones are removed until the rest fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from builder.common.cache.entries import Entries
from builder.common.cache.folder import cache_home, is_off, most_kept


@contextmanager
def bounded_cache() -> Iterator[None]:
    """Trim the stages to `most_kept` bytes after the block. Raises SpecError as `most_kept` does."""
    if is_off():
        yield
        return
    most = most_kept()
    try:
        yield
    finally:
        with suppress(OSError):  # a read-only disk
            Entries(cache_home()).trim(most)

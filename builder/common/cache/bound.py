"""Bound of the disk space for stages: after each build the least recently used ones are removed until the rest fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from builder.common.cache.entries import CacheEntries
from builder.common.cache.folder import cache_home, is_cache_disabled, max_cache_bytes


@contextmanager
def bounded_cache() -> Iterator[None]:
    """Trim the stages to `max_cache_bytes` bytes after the block. Raises SpecError as `max_cache_bytes` does."""
    if is_cache_disabled():
        yield
        return
    limit = max_cache_bytes()
    try:
        yield
    finally:
        with suppress(OSError):  # a read-only disk
            CacheEntries(cache_home()).trim(limit)

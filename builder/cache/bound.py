"""What stages may take of the disk: after each build those that were not used for longest go, until the rest fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from builder.cache.entries import Entries
from builder.cache.folder import cache_home, is_off, most_kept


@contextmanager
def bounded_cache() -> Iterator[None]:
    """Whatever the block keeps, all stages take `most_kept` bytes at most after it. Raises SpecError as that does."""
    if is_off():
        yield
        return
    most = most_kept()
    try:
        yield
    finally:
        with suppress(OSError):  # a read-only disk
            Entries(cache_home()).trim(most)

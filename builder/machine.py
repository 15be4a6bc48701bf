"""What this machine has: cores and memory that a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from builder.proc import counted

_share: int | None = None  # of the cores, where other builds run beside this process


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def working_cores() -> int:
    """The cores that this process may keep busy now: those it may use, or its share of them beside other builds."""
    return available_cores() if _share is None else min(_share, available_cores())


@contextmanager
def sharing_cores(count: int) -> Iterator[None]:
    """Within it, `working_cores` are `count` at most. What is emitted depends on `available_cores`, not on this."""
    global _share
    before, _share = _share, count
    try:
        yield
    finally:
        _share = before


def available_memory() -> int:
    """Bytes that this machine can still give, by /proc/meminfo; a very large number where there is none."""
    return _memory("MemAvailable")


def total_memory() -> int:
    """Bytes of this machine's memory, by /proc/meminfo; a very large number where there is none."""
    return _memory("MemTotal")


def _memory(field: str) -> int:
    size = counted("meminfo", field)
    return 1 << 62 if size is None else size

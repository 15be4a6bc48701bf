"""What this machine has: cores and memory that a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builder.proc import counted

CGROUP = Path("/sys/fs/cgroup")  # in a container, its own
UNKNOWN = 1 << 62  # bytes: more than any machine has

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
    """Bytes that this machine can still give, by /proc/meminfo, or fewer where the container has a limit; a very large
    number where neither is known."""
    return min(_memory("MemAvailable"), _left_to_container())


def total_memory() -> int:
    """Bytes of this machine's memory, by /proc/meminfo; a very large number where there is none."""
    return _memory("MemTotal")


def _left_to_container() -> int:
    """Bytes below the limit of cgroup v2, of which the pages of files count as free: the system can read them again.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, memory.max, memory.current and memory.stat.
    """
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text("utf-8")) for name in ("max", "current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text("utf-8").splitlines())
    except (OSError, ValueError):  # no cgroup v2, or "max" for no limit
        return UNKNOWN
    return max(0, limit - used + int(counts["active_file"]) + int(counts["inactive_file"]))


def _memory(field: str) -> int:
    size = counted("meminfo", field)
    return UNKNOWN if size is None else size

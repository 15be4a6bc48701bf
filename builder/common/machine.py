"""Resources of this machine: cores and memory that a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from builder.common.processes import read_counter

CGROUP = Path("/sys/fs/cgroup")  # in a container, its own
UNKNOWN_BYTES = 1 << 62  # bytes: more than any machine has

_share: int | None = None  # of the cores, where other builds run beside this process


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def working_cores() -> int:
    """Return the cores that this process may keep busy now: those it may use, or its share beside other builds."""
    return available_cores() if _share is None else min(_share, available_cores())


@contextmanager
def sharing_cores(count: int) -> Iterator[None]:
    """Limit `working_cores` to `count` within the block.

    Emitted files depend on `available_cores`, not on this.
    """
    global _share
    before, _share = _share, count
    try:
        yield
    finally:
        _share = before


def available_memory() -> int:
    """Return the bytes that this machine can still give, by /proc/meminfo, or fewer if the container has a limit.

    A very large number where neither is known.
    """
    container = _container_memory()
    return min(_memory("MemAvailable"), max(0, container.limit - container.used))


def total_memory() -> int:
    """Return the bytes of this machine's memory, by /proc/meminfo, or the container's limit if that is less.

    A very large number where neither is known.
    """
    return min(_memory("MemTotal"), _container_memory().limit)


@dataclass(frozen=True)
class ContainerMemory:
    """Bytes that a container may take, and those of them that are in use.

    Pages of files, which the system can read again, do not count.
    """

    limit: int
    used: int


def _container_memory() -> ContainerMemory:
    for look in (_by_cgroup_2, _by_cgroup_1):
        with suppress(OSError, ValueError, KeyError):  # another version, or "max" for no limit
            return look()
    return ContainerMemory(UNKNOWN_BYTES, 0)


def _by_cgroup_2() -> ContainerMemory:
    """Return the limits by cgroup 2.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, memory.max, memory.current and memory.stat.
    """
    limit, used, counts = _number("memory.max"), _number("memory.current"), _counts("memory.stat")
    return ContainerMemory(limit, used - counts["active_file"] - counts["inactive_file"])


def _by_cgroup_1() -> ContainerMemory:
    """Return the least limit of the container and of those that it is in.

    Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst, memory.usage_in_bytes and memory.stat.
    """
    used, counts = _number("memory/memory.usage_in_bytes"), _counts("memory/memory.stat")
    files = counts["total_active_file"] + counts["total_inactive_file"]
    return ContainerMemory(counts["hierarchical_memory_limit"], used - files)


def _number(file: str) -> int:
    return int((CGROUP / file).read_text("utf-8"))


def _counts(file: str) -> dict[str, int]:
    lines = (CGROUP / file).read_text("utf-8").splitlines()
    return {name: int(count) for name, count in map(str.split, lines)}


def _memory(field: str) -> int:
    size = read_counter("meminfo", field)
    return UNKNOWN_BYTES if size is None else size

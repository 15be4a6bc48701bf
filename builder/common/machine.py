"""Processor of this machine, on which latencies were measured, and the cores and memory that a process may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

CGROUP = Path("/sys/fs/cgroup")  # in a container, its own
UNLIMITED = 1 << 62  # bytes: more than any machine has
SEVEN_BITS = 64  # largest absolute value of a weight whose products x86 without VNNI adds exactly
VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")  # instruction sets that multiply bytes
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")

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


def largest_byte_weight() -> int:
    """Return the largest absolute value of a weight in bytes that ONNX Runtime multiplies exactly on this CPU.

    x86 without VNNI adds two products of bytes in 16 bits (vpmaddubsw), which 2 * 255 * 127 exceeds. There weights take
    7 bits, as with `reduce_range` of onnxruntime.quantization.
    """
    flags = set(cpu()["flags"])
    return SEVEN_BITS if "avx2" in flags and not flags & set(VNNI) else 127


def available_memory() -> int:
    """Return the bytes that this machine can still give, or fewer if the container has a limit."""
    limit, used = _container_memory()
    return min(psutil.virtual_memory().available, max(0, limit - used))


def total_memory() -> int:
    """Return the bytes of this machine's memory, or the container's limit if that is less."""
    return min(psutil.virtual_memory().total, _container_memory()[0])


def _container_memory() -> tuple[int, int]:
    """Return the bytes that the container may take, UNLIMITED if any number, and those in use.

    Pages of files, which the system can read again, do not count. Source: Linux, Documentation/admin-guide,
    cgroup-v2.rst and cgroup-v1/memory.rst; the latter's hierarchical limit is the least of the containers around it.
    """
    with suppress(OSError, ValueError, KeyError):  # cgroup 1, or "max" for no limit
        limit, used, counts = _number("memory.max"), _number("memory.current"), _counts("memory.stat")
        return limit, used - counts["active_file"] - counts["inactive_file"]
    with suppress(OSError, ValueError, KeyError):
        used, counts = _number("memory/memory.usage_in_bytes"), _counts("memory/memory.stat")
        return counts["hierarchical_memory_limit"], used - counts["total_active_file"] - counts["total_inactive_file"]
    return UNLIMITED, 0


def _number(file: str) -> int:
    return int((CGROUP / file).read_text("utf-8"))


def _counts(file: str) -> dict[str, int]:
    lines = (CGROUP / file).read_text("utf-8").splitlines()
    return {name: int(count) for name, count in map(str.split, lines)}


def cpu() -> dict[str, Any]:
    """Return the processor's model name, and the instruction sets of FLAGS that it has."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    return {"model": fields.get("model name", platform.processor()), "flags": [f for f in FLAGS if f in flags]}

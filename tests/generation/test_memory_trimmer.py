"""The memory of a large request is returned to the system."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from builder.runtime import process_memory
from builder.runtime.process_memory import MemoryTrimmer


def test_memory_trimmer_trims_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    trimmed: list[int] = []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(process_memory, "trim", lambda: trimmed.append(1))
    trimmer = MemoryTrimmer()
    for now in (1001.0, 1031.0, 1032.0, 1062.0):  # noqa: B007  # the clock reads it
        trimmer.trim_if_due()
    assert len(trimmed) == 2


def test_memory_trimmer_returns_freed_memory() -> None:
    """A new process frees 64 MB in small pieces, of which the last one keeps the heap from shrinking."""
    program = """
        from builder.runtime import process_memory as memory
        pages = lambda: int(open("/proc/self/statm").read().split()[1])
        memory.TRIM_INTERVAL_S = 0
        trimmer = memory.MemoryTrimmer()
        pieces = [bytearray(4000) for _ in range(16_000)]
        last = bytearray(4000)
        full = pages()
        del pieces
        trimmer.trim_if_due()
        assert pages() < full - 10_000, (full, pages())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

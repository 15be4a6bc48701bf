"""Measure the resident memory of this process, and return free memory to the system."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")
STATM = Path("/proc/self/statm")  # Linux, proc_pid_statm(5): the second number is resident, in pages
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(STATM.read_text("ascii").split()[1]) * PAGE


def trim() -> None:
    """Return free memory to the system; glibc keeps it otherwise. Does nothing on another C library."""
    if _trim is not None:
        _trim(0)

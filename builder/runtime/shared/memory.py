"""Memory of this process: how much the system counts for it, and how what is free is given back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGESIZE")
STATM = Path("/proc/self/statm")  # Linux, proc_pid_statm(5): the second number is resident, in pages
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(STATM.read_text("ascii").split()[1]) * PAGE


def give_back() -> None:
    """Hand what is free back to the system; glibc keeps it otherwise. Does nothing on another C library."""
    if _trim is not None:
        _trim(0)

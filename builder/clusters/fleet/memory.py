"""Memory of a process, as Linux counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from builder.common.processes import read_counter

RESET_PEAK = "5"  # man proc_pid_clear_refs(5): the peak becomes what is resident now


def resident_memory(process: int) -> int:
    """Return the bytes of a process that are resident now; 0 if it has ended, or there is no /proc."""
    return read_counter(f"{process}/status", "VmRSS") or 0


def own_memory() -> int:
    """Return the bytes of this process that are resident and belong to no file, which the system could read again."""
    return read_counter("self/status", "RssAnon") or 0


def peak_memory() -> int:
    """Return the peak resident bytes of this process since `reset_peak_memory`; 0 if there is no /proc."""
    return read_counter("self/status", "VmHWM") or 0


def reset_peak_memory() -> None:
    """Restart `peak_memory` from now; if the system does not allow that, it counts from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)

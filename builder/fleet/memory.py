"""What a process has in memory, as Linux counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from builder.proc import counted

RESET_PEAK = "5"  # man proc_pid_clear_refs(5): the peak becomes what is resident now


def resident_memory(process: int) -> int:
    """Bytes of a process that are resident now; 0 where it is no more, or there is no /proc."""
    return counted(f"{process}/status", "VmRSS") or 0


def own_memory() -> int:
    """Bytes of this process that are resident and belong to no file, which the system could read again."""
    return counted("self/status", "RssAnon") or 0


def peak_memory() -> int:
    """The most bytes of this process that were resident since `reset_peak_memory`; 0 where there is no /proc."""
    return counted("self/status", "VmHWM") or 0


def reset_peak_memory() -> None:
    """Have `peak_memory` begin anew; where the system does not allow it, it goes on from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)

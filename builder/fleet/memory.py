"""What this process has in memory, as Linux counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # man proc_pid_clear_refs(5): the peak becomes what is resident now


def resident_memory() -> int:
    """Bytes that are resident now; 0 where there is no /proc."""
    return _status("VmRSS")


def peak_memory() -> int:
    """The most bytes that were resident since `reset_peak_memory`; 0 where there is no /proc."""
    return _status("VmHWM")


def reset_peak_memory() -> None:
    """Have `peak_memory` begin anew; where the system does not allow it, it goes on from the start of the process."""
    with suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def _status(field: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)

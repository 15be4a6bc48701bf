"""Time that this process waited for a core, to notice that other programs used them while it measured.

Linux counts for each thread how long it ran and how long it could have run but waited (/proc/PID/task/*/schedstat, by
the kernel's Documentation/scheduler/sched-stats.rst); elsewhere the wait is unknown, and nothing is reported.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
BUSY_SHARE = 0.2  # of the time that threads could run: a larger share is caused by other processes


class CpuWaitMeter:
    """Meter of the time that this process's threads wait for a core, from now on."""

    def __init__(self) -> None:
        self.start = _times()

    @property
    def share(self) -> float:
        """Share of their runnable time that this process's threads waited for a core, 0 to 1."""
        ran, waited = (max(0, now - then) for now, then in zip(_times(), self.start, strict=True))
        return waited / (ran + waited) if ran + waited else 0.0


def _times() -> tuple[int, int]:
    """Return the nanoseconds that the threads ran, and that they waited."""
    ran = waited = 0
    for file in TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            numbers = file.read_text().split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited

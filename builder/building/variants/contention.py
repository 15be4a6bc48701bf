"""Measures whether something else used the cores while this process measured: how long its threads waited for one.

Linux counts for each thread how long it ran and how long it could have run but waited (/proc/PID/task/*/schedstat, by
the kernel's Documentation/scheduler/sched-stats.rst); elsewhere the wait is unknown, and nothing is reported.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")
BUSY = 0.2  # of the time that threads could run: a larger share has causes outside the process


class Waiting:
    """Time that this process's threads waited for a core, from now on."""

    def __init__(self) -> None:
        self.begun = _times()

    @property
    def share(self) -> float:
        """Share of the time in which this process's threads could run that they waited for a core, 0 to 1."""
        ran, waited = (max(0, now - then) for now, then in zip(_times(), self.begun, strict=True))
        return waited / (ran + waited) if ran + waited else 0.0


def _times() -> tuple[int, int]:
    """Return the nanoseconds that the threads ran, and that they waited."""
    ran = waited = 0
    for file in TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            numbers = file.read_text().split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited

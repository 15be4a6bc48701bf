"""What `--workers` says: how many builds at once, and on what."""

from __future__ import annotations

from argparse import ArgumentTypeError

from builder.fleet.executor import Executor
from builder.fleet.processes import Processes
from builder.machine import available_cores


def count(text: str) -> int:
    """A value of --workers. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number of processes, from 1 on")
    return int(text)


def workers(asked: int | None, builds: int) -> int:
    """Builds at once: as many as were asked for, a core each where nobody asked, and no more than there are."""
    return max(1, min(available_cores() if asked is None else asked, builds))


def executor(asked: int | None, workers: int, memory: int, verbose: bool) -> Executor:
    """Of `workers` builds that take `memory` bytes together."""
    return Processes(workers, memory, verbose=verbose)

"""What `--workers` says: how many builds at once, and on what."""

from __future__ import annotations

from argparse import ArgumentTypeError

from builder.fleet.executor import Executor
from builder.fleet.processes import Processes
from builder.machine import available_cores

RAY = "ray"


def count(text: str) -> int | str:
    """A value of --workers. Raises ArgumentTypeError."""
    if text == RAY:
        return RAY
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is neither a number of processes, from 1 on, nor {RAY}")
    return int(text)


def workers(wanted: int | str | None, builds: int) -> int:
    """Builds at once: as many as were asked for, a core each where nobody asked, and no more than there are.

    On Ray the cluster decides; this is then what a machine like this one would have.
    """
    return max(1, min(wanted if isinstance(wanted, int) else available_cores(), builds))


def executor(wanted: int | str | None, workers: int, memory: int, verbose: bool) -> Executor:
    """Of `workers` builds that take `memory` bytes together; on Ray, of as many as its nodes have room for."""
    if wanted == RAY:
        from builder.fleet.ray import OnRay
        from builder.ray.cluster import cluster_address

        return OnRay(cluster_address())
    return Processes(workers, memory, verbose=verbose)

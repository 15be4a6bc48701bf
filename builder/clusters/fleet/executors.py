"""Values of `--workers`: how many builds run at once, and on what."""

from __future__ import annotations

from argparse import ArgumentTypeError

from builder.clusters.fleet.executor import Executor
from builder.clusters.fleet.processes import Processes
from builder.common.machine import available_cores

RAY = "ray"


def count(text: str) -> int | str:
    """Parse a value of --workers. Raises ArgumentTypeError."""
    if text == RAY:
        return RAY
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is neither a number of processes, from 1 on, nor {RAY}")
    return int(text)


def workers(wanted: int | str | None, builds: int) -> int:
    """Return how many builds run at once: as many as requested, by default one per core, and at most `builds`.

    On Ray the cluster decides; the result is then what a machine like this one would run.
    """
    return max(1, min(wanted if isinstance(wanted, int) else available_cores(), builds))


def executor(wanted: int | str | None, workers: int, memory: int, verbose: bool) -> Executor:
    """Return an executor of `workers` builds that share `memory` bytes; on Ray, of as many as fit on its nodes."""
    if wanted == RAY:
        from builder.clusters.fleet.ray import OnRay
        from builder.clusters.ray.cluster import cluster_address

        return OnRay(cluster_address())
    return Processes(workers, memory, verbose=verbose)

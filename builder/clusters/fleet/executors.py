"""Values of `--workers`: how many builds run at once, and on what."""

from __future__ import annotations

from argparse import ArgumentTypeError

from builder.clusters.fleet.executor import Executor
from builder.clusters.fleet.processes import ProcessExecutor
from builder.common.machine import available_cores

RAY = "ray"


def parse_workers(text: str) -> int | str:
    """Parse a value of --workers. Raises ArgumentTypeError."""
    if text == RAY:
        return RAY
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is neither a number of processes, from 1 on, nor {RAY}")
    return int(text)


def concurrent_builds(requested: int | str | None, builds: int) -> int:
    """Return how many builds run at once: as many as requested, by default one per core, and at most `builds`.

    On Ray the cluster decides; the result is then what a machine like this one would run.
    """
    return max(1, min(requested if isinstance(requested, int) else available_cores(), builds))


def make_executor(requested: int | str | None, concurrent_builds: int, memory: int, verbose: bool) -> Executor:
    """Return an executor of `workers` builds that share `memory` bytes; on Ray, of as many as fit on its nodes."""
    if requested == RAY:
        from builder.clusters.fleet.ray import RayExecutor
        from builder.clusters.ray.cluster import cluster_address

        return RayExecutor(cluster_address())
    return ProcessExecutor(concurrent_builds, memory, verbose=verbose)

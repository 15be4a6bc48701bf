"""Executor of a Ray cluster: each build is a task, on a node that has the cores and the memory for it.

A build whose worker or node dies is started again, on a node that is alive. Checkpoints and results go through folders
that all nodes have at the same place, or through an object store (`output: s3://...`) and the Hub.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from builder.clusters.fleet.executor import BuildJob, BuildOutcome, BuildProgress
from builder.clusters.fleet.processes import LOADING
from builder.clusters.fleet.work import run_job
from builder.clusters.ray.cluster import connected
from builder.common.errors import ServeError

MAX_ATTEMPTS = 3
FORWARDED_PREFIXES = ("HF_HUB_", "HF_HOME", "TRANSFORMERS_", "BUILD_REPO_CACHE")  # of environment variables


def forwarded_variables() -> dict[str, str]:
    """Return the variables of this process that a build on another node needs."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}


@dataclass(frozen=True)
class BuildAttempt:
    """Running build. `number`: 1-based number of the attempt."""

    job: BuildJob
    number: int
    started: float
    worker: str = "no node yet"
    stage: str = "waiting for a node"


@dataclass(frozen=True)
class RayExecutor:
    """Executor on the cluster at `address`; None: on a cluster of this machine alone."""

    address: str | None

    def run(self, jobs: Sequence[BuildJob]) -> Generator[BuildProgress | BuildOutcome, None, None]:
        """Build jobs as Executor.run describes."""
        with connected(self.address) as ray:
            start = _starter(ray)
            running = {start(job): BuildAttempt(job, 1, time.perf_counter()) for job in jobs}
            try:
                while running:
                    for task in ray.wait(list(running), num_returns=1, fetch_local=False)[0]:
                        yield _next_report(ray, task, running, start)
            finally:
                for task in running:
                    ray.cancel(task, force=True)


def _starter(ray: Any) -> Callable[[BuildJob], Any]:
    """Return a function that starts a job as a task; one that needs more than any node has gets all of one.

    Tasks take over the working folder and the environment of this process. Raises ServeError for a cluster without a
    core to build on.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise ServeError("no node of the Ray cluster has a core: start one, ray start --num-cpus N")
    cores = max(int(node["CPU"]) for node in nodes)
    memory = max(int(node.get("memory", 0)) for node in nodes)
    build = ray.remote(num_returns="streaming", max_retries=0, scheduling_strategy="SPREAD")(build_on_node)
    folder, variables = os.getcwd(), forwarded_variables()

    def start(job: BuildJob) -> Any:
        needs = {"num_cpus": min(job.cores, cores), "memory": min(job.memory, memory)}
        return build.options(**needs).remote(job, folder, variables)

    return start


def _next_report(
    ray: Any, task: Any, running: dict[Any, BuildAttempt], start: Callable[[BuildJob], Any]
) -> BuildProgress | BuildOutcome:
    """Return the next report of a task, or that it died; a job whose worker or node died is started again."""
    attempt = running.pop(task)
    try:
        report: BuildProgress | BuildOutcome = ray.get(next(task))
    except ray.exceptions.RayError as error:
        if isinstance(error, ray.exceptions.RayTaskError) or attempt.number == MAX_ATTEMPTS:
            return _failed(attempt, error)
        again = BuildAttempt(attempt.job, attempt.number + 1, attempt.started)
        running[start(attempt.job)] = again
        stage = f"its worker died: begun again, {again.number} of {MAX_ATTEMPTS}"
        return BuildProgress(attempt.job.name, attempt.worker, stage)
    if isinstance(report, BuildProgress):
        running[task] = replace(attempt, worker=report.worker, stage=report.stage)
    return report


def _failed(attempt: BuildAttempt, error: Exception) -> BuildOutcome:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    times = f", {MAX_ATTEMPTS} times" if attempt.number == MAX_ATTEMPTS else ""
    text = f"its worker died in the stage {attempt.stage!r}{times}: {lines[-1].strip()[:300]}"
    return BuildOutcome(
        attempt.job.name, attempt.worker, time.perf_counter() - attempt.started, error=text, details=str(error)
    )


def build_on_node(job: BuildJob, folder: str, variables: Mapping[str, str]) -> Iterator[BuildProgress | BuildOutcome]:
    """Run a build as a task in `folder`, and yield its reports."""
    import ray

    node = f"node {ray.get_runtime_context().get_node_id()[:6]}"
    worker = f"{node}:{os.getpid()}"
    if not Path(folder).is_dir():
        error = f"{node} has no {folder}: all nodes need that folder, shared"
        yield BuildOutcome(job.name, worker, 0, error=error)
        return
    os.chdir(folder)
    os.environ.update(variables)
    yield BuildProgress(job.name, worker, LOADING)
    outgoing: SimpleQueue[BuildProgress | BuildOutcome] = SimpleQueue()
    Thread(target=lambda: outgoing.put(run_job(job, worker, outgoing.put)), daemon=True).start()
    while True:
        yield (report := outgoing.get())
        if isinstance(report, BuildOutcome):
            return

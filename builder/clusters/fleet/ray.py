"""Executor of a Ray cluster: each build is a task, on a node that has the cores and the memory for it.

A build whose worker or node dies is started again, on a node that is alive. Checkpoints and results go through folders
that all nodes have at the same place, or through an object store (`output: s3://...`) and the Hub.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
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
class DriverEnvironment:
    """Working folder and environment variables of this process, which tasks take over."""

    folder: str
    variables: Mapping[str, str]


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
        environment = DriverEnvironment(os.getcwd(), forwarded_variables())
        with connected(self.address) as ray:
            cluster = RayCluster(ray, environment)
            running = {cluster.start(job): BuildAttempt(job, 1, time.perf_counter()) for job in jobs}
            try:
                while running:
                    yield from _receive(cluster, running)
            finally:
                for task in running:
                    ray.cancel(task, force=True)


class RayCluster:
    """Cluster that runs the tasks. Raises ServeError for one without a core to build on."""

    def __init__(self, ray: Any, environment: DriverEnvironment) -> None:
        self.ray, self.environment = ray, environment
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            raise ServeError("no node of the Ray cluster has a core: start one, ray start --num-cpus N")
        self.cores = max(int(node["CPU"]) for node in nodes)
        self.memory = max(int(node.get("memory", 0)) for node in nodes)
        self.build = ray.remote(num_returns="streaming", max_retries=0, scheduling_strategy="SPREAD")(build_on_node)

    def start(self, job: BuildJob) -> Any:
        """Start a task and return it; a build that needs more than any node has gets all of one."""
        needs = {"num_cpus": min(job.cores, self.cores), "memory": min(job.memory, self.memory)}
        return self.build.options(**needs).remote(job, self.environment)

    def wait(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the tasks that have something to report, as soon as one has."""
        return self.ray.wait(list(tasks), num_returns=1, fetch_local=False)[0]

    def next_report(self, task: Any) -> BuildProgress | BuildOutcome:
        """Return the next report of a task. Raises RayError for one that died."""
        return self.ray.get(next(task))


def _receive(cluster: RayCluster, running: dict[Any, BuildAttempt]) -> Iterator[BuildProgress | BuildOutcome]:
    """Wait until tasks have something to report, yield it, and restart those that died."""
    for task in cluster.wait(list(running)):
        attempt = running.pop(task)
        try:
            report = cluster.next_report(task)
        except cluster.ray.exceptions.RayError as error:
            if isinstance(error, cluster.ray.exceptions.RayTaskError) or attempt.number == MAX_ATTEMPTS:
                yield _failed(attempt, error)
                continue
            again = BuildAttempt(attempt.job, attempt.number + 1, attempt.started)
            running[cluster.start(attempt.job)] = again
            stage = f"its worker died: begun again, {again.number} of {MAX_ATTEMPTS}"
            yield BuildProgress(attempt.job.name, attempt.worker, stage)
            continue
        if isinstance(report, BuildProgress):
            running[task] = replace(attempt, worker=report.worker, stage=report.stage)
        yield report


def _failed(attempt: BuildAttempt, error: Exception) -> BuildOutcome:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    times = f", {MAX_ATTEMPTS} times" if attempt.number == MAX_ATTEMPTS else ""
    text = f"its worker died in the stage {attempt.stage!r}{times}: {lines[-1].strip()[:300]}"
    return BuildOutcome(
        attempt.job.name, attempt.worker, time.perf_counter() - attempt.started, error=text, details=str(error)
    )


def build_on_node(job: BuildJob, environment: DriverEnvironment) -> Iterator[BuildProgress | BuildOutcome]:
    """Run a build as a task, and yield its reports."""
    worker = f"{_node()}:{os.getpid()}"
    if not Path(environment.folder).is_dir():
        error = f"{_node()} has no {environment.folder}: all nodes need that folder, shared"
        yield BuildOutcome(job.name, worker, 0, error=error)
        return
    os.chdir(environment.folder)
    os.environ.update(environment.variables)
    yield BuildProgress(job.name, worker, LOADING)
    outgoing: SimpleQueue[BuildProgress | BuildOutcome] = SimpleQueue()
    Thread(target=lambda: outgoing.put(run_job(job, worker, outgoing.put)), daemon=True).start()
    while True:
        yield (report := outgoing.get())
        if isinstance(report, BuildOutcome):
            return


def _node() -> str:
    """Return a short name of this node."""
    import ray

    return f"node {ray.get_runtime_context().get_node_id()[:6]}"

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

from builder.clusters.fleet.executor import Job, Outcome, Progress
from builder.clusters.fleet.processes import LOADING
from builder.clusters.fleet.work import carry_out
from builder.clusters.ray.cluster import connected
from builder.common.errors import ServeError

TIMES = 3  # attempts of a build before it has failed
CARRIED = ("HF_HUB_", "HF_HOME", "TRANSFORMERS_", "BUILD_REPO_CACHE")  # prefixes of variables that a build depends on


def carried_variables() -> dict[str, str]:
    """Return the variables of this process that a build on another node needs."""
    return {name: value for name, value in os.environ.items() if name.startswith(CARRIED)}


@dataclass(frozen=True)
class Place:
    """Environment of this process that a task takes over: the working `folder` and the `variables`."""

    folder: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Attempt:
    """Running build. `time`: 1-based number of the attempt."""

    job: Job
    time: int
    begun: float
    worker: str = "no node yet"
    stage: str = "waiting for a node"


@dataclass(frozen=True)
class OnRay:
    """Executor on the cluster at `address`; None: on a cluster of this machine alone."""

    address: str | None

    def run(self, jobs: Sequence[Job]) -> Generator[Progress | Outcome, None, None]:
        """Build jobs as Executor.run describes."""
        here = Place(os.getcwd(), carried_variables())
        with connected(self.address) as ray:
            cluster = Cluster(ray, here)
            running = {cluster.begin(job): Attempt(job, 1, time.perf_counter()) for job in jobs}
            try:
                while running:
                    yield from _news(cluster, running)
            finally:
                for task in running:
                    ray.cancel(task, force=True)


class Cluster:
    """Cluster that runs the tasks. Raises ServeError for one without a core to build on."""

    def __init__(self, ray: Any, here: Place) -> None:
        self.ray, self.here = ray, here
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            raise ServeError("no node of the Ray cluster has a core: start one, ray start --num-cpus N")
        self.cores = max(int(node["CPU"]) for node in nodes)
        self.memory = max(int(node.get("memory", 0)) for node in nodes)
        self.build = ray.remote(num_returns="streaming", max_retries=0, scheduling_strategy="SPREAD")(build_there)

    def begin(self, job: Job) -> Any:
        """Start a task and return it; a build that needs more than any node has gets all of one."""
        needs = {"num_cpus": min(job.cores, self.cores), "memory": min(job.memory, self.memory)}
        return self.build.options(**needs).remote(job, self.here)

    def ready(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the tasks that have something to report, as soon as one has."""
        return self.ray.wait(list(tasks), num_returns=1, fetch_local=False)[0]

    def hear(self, task: Any) -> Progress | Outcome:
        """Return the next report of a task. Raises RayError for one that died."""
        return self.ray.get(next(task))


def _news(cluster: Cluster, running: dict[Any, Attempt]) -> Iterator[Progress | Outcome]:
    """Wait until tasks have something to report, yield it, and restart those that died."""
    for task in cluster.ready(list(running)):
        attempt = running.pop(task)
        try:
            news = cluster.hear(task)
        except cluster.ray.exceptions.RayError as error:
            if isinstance(error, cluster.ray.exceptions.RayTaskError) or attempt.time == TIMES:
                yield _failed(attempt, error)
                continue
            again = replace(attempt, time=attempt.time + 1, worker="no node yet", stage="waiting for a node")
            running[cluster.begin(attempt.job)] = again
            yield Progress(attempt.job.name, attempt.worker, f"its worker died: begun again, {again.time} of {TIMES}")
            continue
        if isinstance(news, Progress):
            running[task] = replace(attempt, worker=news.worker, stage=news.stage)
        yield news


def _failed(attempt: Attempt, error: Exception) -> Outcome:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    times = f", {TIMES} times" if attempt.time == TIMES else ""
    text = f"its worker died in the stage {attempt.stage!r}{times}: {lines[-1].strip()[:300]}"
    return Outcome(
        attempt.job.name, attempt.worker, time.perf_counter() - attempt.begun, error=text, details=str(error)
    )


def build_there(job: Job, here: Place) -> Iterator[Progress | Outcome]:
    """Run a build as a task, and yield its reports."""
    worker = f"{_node()}:{os.getpid()}"
    if not Path(here.folder).is_dir():
        yield Outcome(job.name, worker, 0, error=f"{_node()} has no {here.folder}: all nodes need that folder, shared")
        return
    os.chdir(here.folder)
    os.environ.update(here.variables)
    yield Progress(job.name, worker, LOADING)
    outgoing: SimpleQueue[Progress | Outcome] = SimpleQueue()
    Thread(target=lambda: outgoing.put(carry_out(job, worker, outgoing.put)), daemon=True).start()
    while True:
        yield (news := outgoing.get())
        if isinstance(news, Outcome):
            return


def _node() -> str:
    """Return a short name of this node."""
    import ray

    return f"node {ray.get_runtime_context().get_node_id()[:6]}"

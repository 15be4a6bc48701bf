"""Serving and building on a Ray cluster of several nodes, with replicas and nodes killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from builder.clusters.fleet.executor import BuildJob, BuildOutcome, BuildProgress
from builder.clusters.fleet.ray import RayExecutor
from builder.clusters.ray.cluster import NAME, connected, read_options, serving
from builder.options import make_spec
from builder.serving.server.triton import free_ports
from tests.clusters.ray.cluster import Nodes, kill, ray_nodes, stubs
from tests.models import join

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 300
STATUS_S = 0.5  # between requests for the status of an application, each of which takes a core for a moment
TEXT = "The museum opens late on Fridays"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Run a cluster without cores; each test requests the nodes that it needs."""
    with ray_nodes() as nodes:
        yield nodes


def test_build_continues_on_another_node_when_its_node_dies(
    nodes: Nodes, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    nodes.at_least(1)
    output = tmp_path / "repository"
    good, bad = (
        make_spec(model=model, name=name, output=output, max_length=64)
        for name, model in (("good", str(checkpoint("topics"))), ("bad", str(tmp_path / "nowhere")))
    )
    events: list[BuildProgress | BuildOutcome] = []
    for news in RayExecutor(nodes.address).run([BuildJob(good, 500_000_000), BuildJob(bad, 500_000_000)]):
        events.append(news)
        if isinstance(news, BuildProgress) and (news.name, news.stage) == ("good", "export") and _deaths(events) == 0:
            nodes.kill(news.worker.split()[1].split(":")[0])
            nodes.at_least(1)
    outcomes = {news.name: news for news in events if isinstance(news, BuildOutcome)}
    assert outcomes["bad"].error is not None
    assert "neither a folder nor a Hub id" in outcomes["bad"].error
    report = outcomes["good"].report
    assert report is not None
    assert report.version == 1
    assert _deaths(events) == 1
    assert {path.name for path in output.iterdir()} == {"good"}


def _deaths(events: list[BuildProgress | BuildOutcome]) -> int:
    """Return how often the worker of the model `good` died; the other's may have run on the same node."""
    stages = [news.stage for news in events if isinstance(news, BuildProgress) and news.name == "good"]
    return sum("its worker died" in stage for stage in stages)


@pytest.fixture(scope="module")
def models(built: Callable[[str], Path], module_folder: Callable[[str], Path]) -> Path:
    """Return a repository of a classifier that answers slowly."""
    models = join([built("topics")], module_folder("on-ray") / "models")
    _pause_before_each_batch(models / "topics" / "1" / "model.py")
    return models


def _pause_before_each_batch(program: Path) -> None:
    """Let a model sleep: many requests then wait at once without a load that delays the start of a replica."""
    text, answer = program.read_text("utf-8"), "        answers = self.front(tensors)\n"
    assert answer in text
    program.unlink()  # a link to the file that other tests read
    program.write_text(text.replace(answer, "        time.sleep(0.03)\n" + answer), "utf-8")


@dataclass
class Site:
    """Application for clients. `nodes`: those that it runs on; `models`: its repository."""

    port: int
    nodes: Nodes
    models: Path
    failures: list[Any] = field(default_factory=list)

    def classify(self) -> Any:
        """Return the answer of the classifier."""
        body = {"model": "topics", "inputs": [TEXT]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/tasks/text-classification",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return json.loads(response.read())[0][0]["label"]

    def stubs(self) -> dict[int, int]:
        """Return the processes of the classifier, and the Triton of each."""
        return stubs(self.models / "topics")

    def replicas(self) -> dict[str, int]:
        """Return the number of replicas by state."""
        from ray import serve

        return dict(serve.status().applications[NAME].deployments["Triton"].replica_states)

    def whole(self) -> Site:
        """Wait for the initial state: two replicas on two nodes, which the gateway uses."""
        self.nodes.at_least(2)
        _wait_for(lambda: self.replicas() == {"RUNNING": 2}, STATUS_S)
        _wait_for(lambda: self.accepting() == 2, STATUS_S)
        return self

    def accepting(self) -> int:
        """Return the number of Tritons that the gateway sends requests to."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=WAIT_S) as response:
            return len(re.findall(r"^build_repo_gateway_server_accepting\{.*\} 1\.0$", response.read().decode(), re.M))

    @contextmanager
    def asked(self, clients: int) -> Iterator[list[int]]:
        """Run clients in a loop, append one item per answer, and record failures."""
        done, counts = threading.Event(), list[int]()
        threads = [threading.Thread(target=self._ask_until, args=(done, counts)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield counts
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def _ask_until(self, done: threading.Event, counts: list[int]) -> None:
        while not done.is_set():
            try:
                self.classify()
                counts.append(1)
            except (urllib.error.URLError, OSError, KeyError) as error:
                self.failures.append(error)


@pytest.fixture(scope="module")
def site(nodes: Nodes, models: Path) -> Iterator[Site]:
    """Serve two replicas on nodes of their own.

    A third starts if there is another node and each has more than 3 requests at once.
    """
    nodes.at_least(2)
    replicas = {"min_replicas": 2, "max_replicas": 3}
    options = read_options({"repository": str(models), **replicas, "busy": 3, "grow_after_s": 0.5, "shrink_after_s": 1})
    port = free_ports().http
    with connected(nodes.address), _looking_often(), serving(options, "127.0.0.1", port):
        yield Site(port, nodes, models)


@contextmanager
def _looking_often() -> Iterator[None]:
    """Make Ray sample an application's requests continuously instead of every ten seconds over the last thirty.

    A replica that ends looks for running requests every tenth of a second instead of every two seconds.
    """
    from ray import serve

    deployment = serve.deployment

    def hurried(*positional: Any, **options: Any) -> Any:
        options["graceful_shutdown_wait_loop_s"] = 0.1
        if "autoscaling_config" in options:
            options["autoscaling_config"] |= {"metrics_interval_s": 0.2, "look_back_period_s": 1.0}
        return deployment(*positional, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "deployment", hurried)
        yield


def test_killed_triton_fails_no_request_and_another_is_used(site: Site) -> None:
    site.whole()
    first = set(site.stubs().values())
    with site.asked(4) as counts:
        _wait_for(lambda: len(counts) > 20)
        kill(min(first))
        _wait_for(lambda: len(set(site.stubs().values()) - first) == 1)
        _wait_for(lambda: site.accepting() == 2)
        before = len(counts)
        _wait_for(lambda: len(counts) > before + 50)
    assert site.failures == []


def test_triton_on_ray_runs_with_normal_priority(site: Site) -> None:
    """Ray's default niceness of 15 starves Triton on a busy node."""
    tritons = set(site.whole().stubs().values())
    assert {os.getpriority(os.PRIO_PROCESS, triton) for triton in tritons} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_killed_node_fails_no_request(site: Site) -> None:
    process = next(iter(site.whole().stubs()))  # may outlive its node, because the backend's watchdog can hang
    with site.asked(4) as counts:
        _wait_for(lambda: len(counts) > 20)
        site.nodes.kill(site.nodes.of(process))
        before = len(counts)
        _wait_for(lambda: len(counts) > before + 50)
    assert site.failures == []


def test_ray_adds_a_replica_under_load_and_removes_it_after(site: Site) -> None:
    """No request fails while a replica is added or removed."""
    site.whole()
    site.nodes.at_least(3)
    with site.asked(13):
        _wait_for(lambda: site.replicas() == {"RUNNING": 3}, STATUS_S)
        _wait_for(lambda: site.accepting() == 3, STATUS_S)
    with site.asked(1):
        _wait_for(lambda: site.replicas() == {"RUNNING": 2}, STATUS_S)
    assert site.failures == []


def test_killed_head_fails_no_request_and_can_be_started_again(site: Site) -> None:
    head = site.whole().nodes.cluster.head_node
    with site.asked(2) as counts:
        _wait_for(lambda: len(counts) > 10)
        head.kill_gcs_server()
        before = len(counts)
        _wait_for(lambda: len(counts) > before + 50)
        head.start_gcs_server()
        _wait_for(lambda: site.replicas() == {"RUNNING": 2}, STATUS_S)
        after = len(counts)
        _wait_for(lambda: len(counts) > after + 50)
    assert site.accepting() == 2
    assert site.failures == []


def _wait_for(condition: Callable[[], bool], interval_s: float = 0.05) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(interval_s)

"""A cluster's probes and metrics, against a real Triton and the gateway's own metrics."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from builder.clusters.deploy.contents import read_deployed_models
from builder.clusters.deploy.deployment import DeployedModel, Deployment
from builder.clusters.deploy.probes import REQUEST_TIMEOUT_S, live_probe, ready_probe
from builder.clusters.deploy.scaling import wait_queries
from builder.clusters.deploy.targets.kserve import replicas_query
from builder.repository.liveness import ask_command
from builder.serving.client.client import Client
from builder.serving.gateway.metrics import ENGINE, Metrics
from builder.serving.server.stubs import Stubs
from builder.serving.server.triton import Ports, TritonServer, running
from tests.clusters.deploy.deployments import STORED
from tests.http_servers import http_server

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "kubernetes.md").read_text()
PICKED = re.findall(r'RequestsSpec: "([\w:]+)"', PAGE)  # metrics that the guide configures for an endpoint picker


def _names(exposed: str) -> dict[str, set[str]]:
    """Return the labels of each exposed metric."""
    names: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", exposed, re.MULTILINE):
        names.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return names


def _of(repository: Path) -> Deployment:
    models = read_deployed_models(str(repository))
    return replace(STORED, models=models, probed=tuple(model.name for model in models))


def _asks(query: str) -> dict[str, set[str]]:
    """Return for each metric of a query the labels that it groups by or selects on, without those Prometheus adds."""
    grouped = set(re.findall(r"by \((\w+)\)", query)) - {"pod"}
    return {
        name: (grouped | set(re.findall(r"(\w+)=~?\"", matchers))) - {"namespace", "pod"}
        for name, matchers in re.findall(r"([a-z][\w:]+)\{([^}]*)\}", query)
    }


def test_queried_metrics_and_labels_are_exposed(
    repository: Path, client: Callable[[str], Client], server: TritonServer
) -> None:
    client("topics").ask({"text_input": "a text"})
    deployment = _of(repository)
    with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics") as answer:
        there = _names(answer.read().decode())
    gateway = Metrics()
    gateway.queue.labels("writes").observe(0.1)
    gateway.running.labels("writes", ENGINE)
    there |= _names(gateway.text().decode())
    wanted = [
        *wait_queries(deployment, "search").values(),
        *wait_queries(deployment, "search", with_gateway=False).values(),
    ]
    assert len(wanted) == 6, "batchers, fronts and decode loops, with and without a gateway"
    for query in [*wanted, replicas_query(deployment)]:
        for name, labels in _asks(query).items():
            assert name in there, name
            assert labels <= there[name] | {"pod"}, name
    assert len(PICKED) == 2
    assert set(PICKED) <= set(_names(gateway.text().decode()))


def _run(command: list[str], ports: Ports) -> int:
    """Run a probe's command with the ports of this server; skip gRPC if it has no port."""
    if not ports.grpc:
        command = [word.replace(ask_command("127.0.0.1:8001", REQUEST_TIMEOUT_S), "true") for word in command]
    for usual, here in ((8000, ports.http), (8001, ports.grpc), (8002, ports.metrics)):
        command = [word.replace(f"127.0.0.1:{usual}", f"127.0.0.1:{here}") for word in command]
    return subprocess.run(command, capture_output=True, timeout=600, check=False).returncode


def test_probes_pass_on_healthy_models(repository: Path, server: TritonServer) -> None:
    deployment = _of(repository)
    assert {model.generates for model in deployment.models} == {True, False}
    assert _run(live_probe(deployment)["exec"]["command"], replace(server.ports, grpc=0)) == 0
    assert _run(ready_probe(deployment)["exec"]["command"], server.ports) == 0
    assert _run(ready_probe(replace(deployment, probed=("topics", "nobody")))["exec"]["command"], server.ports) != 0
    for model in deployment.models:
        refusal = _refusal(server, model)
        assert not re.search("inference input|inputs but got|JSON", refusal), f"{model.name}: {refusal}"


def _refusal(server: TritonServer, model: DeployedModel) -> str:
    """Return the error that the model gives for a probe's request, or an empty string."""
    url = f"http://{server.host}:{server.ports.http}/v2/models/{model.name}/generate"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=model.request.encode()), timeout=300):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_model_probe_detects_a_killed_model_process(small_repository: Path) -> None:
    """Triton still reports the model as ready."""
    deployment = _of(small_repository)
    probe = live_probe(deployment)["exec"]["command"]
    with running(small_repository, liveness=True) as server:
        assert _run(probe, server.ports) == 0
        assert _run(live_probe(replace(deployment, probed=()))["exec"]["command"], server.ports) == 0
        (process,) = [stub.pid for stub in Stubs(server.process.pid).find() if stub.model == "topics"]
        os.kill(process, signal.SIGKILL)
        end = time.monotonic() + 300
        while _run(probe, server.ports) == 0 and time.monotonic() < end:
            time.sleep(0.1)
        assert _run(probe, server.ports) == 1
        assert _run(ready_probe(deployment)["exec"]["command"], server.ports) == 0


@contextmanager
def _fake_triton(answers: dict[str, tuple[int, str]]) -> Iterator[Ports]:
    """Run a fake Triton that chooses its answer by the end of a request's path."""

    class Fake(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = next(answer for end, answer in answers.items() if self.path.endswith(end))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Fake) as port:
        yield Ports(port, 0, port)


WELL = {
    "/health/live": (200, ""),
    "/health/ready": (200, ""),
    "/metrics": (200, 'build_repo_healthy{model="a",version="1"} 1\n'),
    "/generate": (200, "{}"),
}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"/generate": (503, '{"error": "Exceeds maximum queue size"}')}, 0),
        ({"/generate": (400, '{"error": "a text of \\u0027is not healthy"}')}, 1),
        ({"/metrics": (200, 'build_repo_healthy{model="b",version="1"} 1\nbuild_repo_healthy{model="a"} 0\n')}, 1),
        ({"/metrics": (200, 'build_repo_healthy{model="a"} 0.000000')}, 1),
        ({"/metrics": (404, "")}, 0),
    ],
)
def test_live_probe_fails_only_on_a_dead_model(change: dict[str, tuple[int, str]], status: int) -> None:
    with _fake_triton({**WELL, **change}) as ports:
        assert _run(live_probe(replace(STORED, probed=("minilm",)))["exec"]["command"], ports) == status


@pytest.mark.parametrize(("release", "path"), [("26.03", "live"), ("26.04", "ready")])
def test_live_probe_fails_if_the_health_endpoint_fails(release: str, path: str) -> None:
    """From 26.04 on, readiness also covers models that are not probed."""
    models = tuple(replace(model, release=release) for model in STORED.models)
    with _fake_triton({**WELL, f"/health/{path}": (500, "")}) as ports:
        probe = live_probe(replace(STORED, models=models, probed=("minilm",)))
        assert _run(probe["exec"]["command"], ports) not in (0, 1)


def test_live_probe_quotes_the_request_of_a_model() -> None:
    odd = replace(STORED.models[0], name="odd", request='{"text_input": "it\'s"}')
    assert isinstance(odd, DeployedModel)
    command = live_probe(replace(STORED, models=(odd,), probed=("odd",)))["exec"]["command"]
    with _fake_triton(WELL) as ports:
        assert _run(command, ports) == 0

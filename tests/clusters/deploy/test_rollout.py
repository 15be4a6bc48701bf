"""Replace real Tritons with the arguments of the manifests, one after another, while clients ask two gateways."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from builder.clusters.deploy.deployment import LoadingOnDemand
from builder.clusters.deploy.objects import objects
from builder.common.workplace import temporary_folder
from builder.repository.config.arguments import LIVENESS_FOLDER, MODELS_FOLDER
from builder.repository.liveness import put_liveness
from builder.repository.stores.description import fetch_description
from builder.repository.stores.store import open_store
from builder.repository.stores.transfer import push
from builder.serving.gateway.fleet.targets import AddressFile
from builder.serving.server.embedded import BACKENDS, EMBEDDED, prepare_embedded
from builder.serving.server.process import process_group
from builder.serving.server.triton import free_ports
from tests.clusters.deploy.deployments import ON_DEMAND
from tests.served.patience import comes_about
from tests.serving.commands import put_echo
from tests.serving.gateway.fleet.test_on_demand_processes import NAMED, NAMES, ask, metric, metrics_of

CLIENTS = 6
# a gateway reads the addresses again after a tenth of the usual time
GATEWAY = """
import sys
from builder.cli import main
from builder.serving.gateway.fleet import members
members.RESOLUTION_INTERVAL_S = 0.5
sys.exit(main())
"""
MEMORY_GB = 0.56  # a server and three models of about 0.14 GB each, of eight
DEPLOYMENT = replace(
    ON_DEMAND,
    models=tuple(replace(model, release=EMBEDDED) for model in ON_DEMAND.models),
    on_demand=LoadingOnDemand(round(MEMORY_GB * 1e9), (NAMES[0],)),
)


def _arguments(workload: str, here: dict[str, str]) -> list[str]:
    """Return the arguments of the only container of a workload, with what they name in a cluster as it is `here`."""
    (container,) = objects(DEPLOYMENT)[workload]["spec"]["template"]["spec"]["containers"]
    arguments = []
    for word in container["args"]:
        option, is_given, value = word.partition("=")
        arguments.append(f"{option}={here.get(value, value)}" if is_given else word)
    return arguments


@contextmanager
def _triton(repository: Path, addresses: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a Triton on `repository`, and add its address once it is live."""
    ports = free_ports()
    with temporary_folder() as scratch:
        embedded = prepare_embedded(repository, scratch, BACKENDS)
        here = {MODELS_FOLDER: str(repository), LIVENESS_FOLDER: str(put_liveness(scratch / "liveness"))}
        own = [word for word in embedded.command[1:] if word.startswith(("--backend-", "--cache-directory"))]
        command = [embedded.command[0], *_arguments("tritons", here), *own, *ports.options("127.0.0.1")]
        with process_group(command, embedded.environment, None) as (process, log, _):
            live = ["curl", "--fail", "--silent", f"http://127.0.0.1:{ports.http}/v2/health/live"]
            assert comes_about(lambda: subprocess.run(live, check=False).returncode == 0), log
            addresses.append(f"127.0.0.1:{ports.grpc}")
            yield process


@contextmanager
def _gateway(repository: Path, file: AddressFile) -> Iterator[int]:
    port = free_ports().http
    here = {"dns:///search-tritons:8001": str(file), MODELS_FOLDER: str(repository), "0.0.0.0": "127.0.0.1"}
    words = [*_arguments("deployment", {**here, "9000": str(port)})]
    process = subprocess.Popen([sys.executable, "-c", GATEWAY, "gateway", *words], stdout=subprocess.DEVNULL)
    try:
        assert comes_about(lambda: _is_ready(port))
        yield port
    finally:
        process.terminate()
        process.wait()


def _is_ready(port: int) -> bool:
    ready = ["curl", "--fail", "--silent", "--output", "/dev/null", f"http://127.0.0.1:{port}/health/ready"]
    return subprocess.run(ready, check=False).returncode == 0


def _residents(ports: Sequence[int]) -> float:
    """Return the loaded models of all Tritons, as the gateway that knows of fewer counts them."""
    return min(metric(port, "resident_models") for port in ports)


def _accepting(ports: Sequence[int]) -> list[set[str]]:
    """Return the servers that each gateway sends requests to."""
    prefix = "build_repo_gateway_server_accepting{server="
    accepting = ([line for line in metrics_of(port) if line.startswith(prefix)] for port in ports)
    return [{line.split('"')[1] for line in lines if line.endswith(" 1.0")} for lines in accepting]


def _make_models(repository: Path, version: int) -> Path:
    """Write the models to a repository that has one version of each; return what a gateway pulls of them."""
    store = open_store(f"file://{repository}-store")
    for name in NAMES:
        put_echo(repository, name)
        folder = (repository / name / "1").rename(repository / name / f"{version}")
        (folder / "model.py").write_text(NAMED)
        (folder / "build.json").write_text(json.dumps({"name": name, "files": {name: {}}}))
        shutil.copy(folder / "build.json", repository / name)
        shutil.copy(repository / name / "config.pbtxt", folder)
        push(repository, name, store)
        fetch_description(store.manifest(name), store, repository.with_suffix(".described"))
    return repository.with_suffix(".described")


@pytest.mark.slow
def test_rollout_of_new_versions_fails_no_request(tmp_path: Path) -> None:
    """Old and new Tritons have a version of each model each, and so have the gateways. None knows of the other."""
    old, new = tmp_path / "old", tmp_path / "new"
    described = [_make_models(repository, version) for version, repository in enumerate((old, new), 1)]
    addresses: list[str] = []
    file = AddressFile(tmp_path / "tritons")
    outcomes, stopping = Counter[str](), threading.Event()
    with ExitStack() as stack:
        tritons = [stack.enter_context(_triton(old, addresses)) for _ in range(2)]
        file.write(addresses)
        ports = [stack.enter_context(_gateway(repository, file)) for repository in described]

        def client(number: int) -> None:
            random = Random(number)
            while not stopping.is_set():
                outcomes[ask(ports[number % 2], random.choice(NAMES), f"{number} asks")] += 1

        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [clients.submit(client, number) for number in range(CLIENTS)]
            try:
                assert comes_about(lambda: _residents(ports) > 3), "more than one has room for"
                assert comes_about(lambda: all(metric(port, "model_evictions_total") > 0 for port in ports))
                for triton in tritons:
                    before = outcomes.total()
                    stack.enter_context(_triton(new, addresses))
                    file.write(addresses)
                    assert comes_about(lambda: _accepting(ports) == [set(addresses)] * 2)
                    file.write(addresses[1:])  # the old one leaves the name before it is told to end
                    del addresses[0]
                    assert comes_about(lambda: _accepting(ports) == [set(addresses)] * 2)
                    triton.terminate()
                    assert comes_about(lambda: outcomes.total() > before + 30)  # noqa: B023
            finally:
                stopping.set()
            for one in asking:
                one.result()
        assert set(outcomes) == {"right"}, outcomes

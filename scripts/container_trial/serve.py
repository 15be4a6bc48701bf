"""Pull, Triton and gateway as containers of their own, as confined as in the manifests, under load."""

from __future__ import annotations

import os
import time
from pathlib import Path

from builder.clusters.deploy.pod import GATEWAY_MEMORY, GATEWAY_PORT, NOBODY_UID, PULL_MEMORY
from builder.repository.config.arguments import GRPC_PORT, HTTP_PORT, USER, arguments, command
from builder.serving.server.embedded import EMBEDDED
from scripts.container_trial.containers import CONFINED, Container, removed_after, start
from scripts.container_trial.engine import NETWORK, Engine, TrialError
from scripts.container_trial.images import GATEWAY, PULL, TRITON
from scripts.container_trial.repository import Repository
from scripts.container_trial.traffic import MODEL, ask_all, under_load

CLIENTS, SECONDS = 16, 20
READY = ("curl", "--fail", "--silent", f"http://127.0.0.1:{HTTP_PORT}/v2/health/ready")
GATEWAY_READY = (
    "python",
    "-c",
    f"import urllib.request as u; u.urlopen('http://127.0.0.1:{GATEWAY_PORT}/health/ready')",
)


def serve(engine: Engine, repository: Repository, scratch: Path) -> str:
    """Pull a model, serve it, and ask for 20 s; return what was answered and the memory that it took.

    Raises TrialError if an answer differs from PyTorch's, a request fails, or a process is killed for memory.
    """
    models = pull(engine, repository, scratch)
    with removed_after(engine, "gateway", "triton"):
        server = start_triton(engine, "triton", repository, models)
        server.wait(READY)
        gateway = start_gateway(engine, f"{server.address(NETWORK)}:{GRPC_PORT}")
        gateway.wait(GATEWAY_READY)
        host = gateway.address(NETWORK)
        ask_all(host, GATEWAY_PORT, repository.answers).require(len(repository.answers.texts))
        with under_load([host], GATEWAY_PORT, [repository.answers], CLIENTS) as load:
            time.sleep(SECONDS)
        load.require(CLIENTS)
        return f"{load} in {SECONDS} s from {CLIENTS} clients; {memory(server)}; {memory(gateway)}"


def memory(container: Container) -> str:
    """Return the memory of a container. Raises TrialError if a process was killed for it."""
    use = container.memory()
    if use.kills or not container.is_running():
        raise TrialError(f"{container.name}: {use.kills} processes were killed for memory: {use}")
    return f"{container.name} {use}"


def pull(engine: Engine, repository: Repository, scratch: Path) -> Path:
    """Return a folder with the models that a container without a network has pulled from the store."""
    pulled = scratch / "pulled"
    pulled.mkdir()
    os.chown(pulled, USER, USER)
    options = ["--network=none", f"--memory={PULL_MEMORY}", f"--user={USER}:{USER}", "--env=HOME=/tmp"]
    mounts = [f"--volume={repository.store}:/store:ro", f"--volume={pulled}:/pulled"]
    words = [MODEL, "--from=file:///store", "--repository=/pulled/models"]
    engine.podman("run", "--rm", "--name=pull", *CONFINED, *options, *mounts, PULL, *words)
    return pulled / "models"


def start_triton(engine: Engine, name: str, repository: Repository, models: Path, *options: str) -> Container:
    """Start Triton on `models` with the limits of the plan and the command of the manifests."""
    limits = [f"--memory={repository.memory}", f"--shm-size={repository.shm}", f"--cpus={repository.cores}"]
    words = [*limits, f"--user={USER}:{USER}", "--env=PYTHONDONTWRITEBYTECODE=1", f"--volume={models}:/models:ro"]
    network = [f"--network={NETWORK}", *options]
    return start(engine, name, TRITON, [*words, *network], [*command(), *arguments(EMBEDDED)])


def start_gateway(engine: Engine, url: str) -> Container:
    """Start the gateway over Tritons at `url`."""
    user = [f"--user={NOBODY_UID}:{NOBODY_UID}", f"--memory={GATEWAY_MEMORY}", f"--network={NETWORK}"]
    return start(engine, "gateway", GATEWAY, user, [f"--url={url}", "--host=0.0.0.0", f"--port={GATEWAY_PORT}"])

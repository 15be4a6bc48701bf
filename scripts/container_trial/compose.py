"""Services of docker-compose.yml by podman-compose, with the limits that `build-repo plan --compose` writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from builder.repository.config.arguments import arguments
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.triton import Ports, free_ports
from scripts.benchmarks.peers import PeerError, environment
from scripts.container_trial.containers import Container
from scripts.container_trial.engine import Engine, TrialError
from scripts.container_trial.images import GATEWAY, ROOT, TRITON
from scripts.container_trial.repository import Repository
from scripts.container_trial.serve import GATEWAY_READY, READY
from scripts.container_trial.traffic import ask_all

PROJECT = "build-repo-compose"
PACKAGE = "podman-compose==1.6.0"
IMAGES = {"triton": TRITON, "gateway": GATEWAY}
SHUTDOWN_TIMEOUT_S = 180
LEFT_OUT = (
    "not started: those of GPUs and vLLM, and those whose images are others' (perf-analyzer, Prometheus, Grafana)"
)


def compose(engine: Engine, repository: Repository, scratch: Path) -> str:
    """Start the services `triton` and `gateway`, run their health checks, and ask on the published port.

    Raises TrialError.
    """
    ports, file = free_ports(), scratch / "docker-compose.yml"
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    removed = change_services(document["services"], ports)
    file.write_text(yaml.dump(document, sort_keys=False), "utf-8")
    try:
        program = environment("podman-compose", (PACKAGE,), engine.folder).with_name("podman-compose")
    except PeerError as error:
        raise TrialError(f"{PACKAGE} cannot be installed: {error}") from error
    words: list[str | Path] = [
        "--project-name",
        PROJECT,
        "--in-pod",
        "false",
        "--file",
        file,
        "--file",
        repository.planned,
    ]
    run = partial(engine.run, "env", f"MODELS={repository.folder}", program, *words)
    profiles = ("--profile", "cpu", "--profile", "gateway")
    try:
        run(*profiles, "up", "--detach", "--no-build")
        for service, check in (("triton", READY), ("gateway", GATEWAY_READY)):
            container = Container(engine, f"{PROJECT}_{service}_1")
            container.wait(check)
            engine.podman("healthcheck", "run", container.name)
        load = ask_all("127.0.0.1", ports.http, repository.answers)
        load.require(len(repository.answers.texts))
    finally:
        run(*profiles, "down", "--volumes", timeout=SHUTDOWN_TIMEOUT_S)
    return f"{load}, on the published port, both health checks pass; removed: {', '.join(removed)}; {LEFT_OUT}"


def change_services(services: dict[str, Any], ports: Ports) -> list[str]:
    """Use the images built here, and a free port for the gateway alone; return the arguments that were removed.

    Those are the arguments that the release of the stand-in does not know.
    """
    for name, image in IMAGES.items():
        del services[name]["build"]
        services[name]["image"] = image
    triton, gateway = services["triton"], services["gateway"]
    triton["ports"], gateway["ports"] = [], [f"127.0.0.1:{ports.http}:9000"]
    unknown = [word for word in triton["command"] if word.startswith("--") and word not in arguments(EMBEDDED)]
    triton["command"] = [word for word in triton["command"] if word not in unknown]
    return unknown

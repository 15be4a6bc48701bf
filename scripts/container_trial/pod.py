"""A pod of pull, Triton and gateway by `podman kube play`, from the manifest that `build-repo deploy` writes."""

from __future__ import annotations

from pathlib import Path

import yaml

from builder.clusters.deploy.pod import GATEWAY_PORT
from scripts.container_trial.containers import Container
from scripts.container_trial.engine import NETWORK, Engine
from scripts.container_trial.manifests import Document, playable, s3_store
from scripts.container_trial.repository import CORES, Repository
from scripts.container_trial.serve import GATEWAY_READY, READY, memory
from scripts.container_trial.traffic import MODEL, ask_all

POD = "models"


def pod(engine: Engine, repository: Repository, scratch: Path) -> str:
    """Push the model to an S3 store, deploy it from there as a pod, and ask its gateway. Raises TrialError."""
    try:
        with s3_store(engine, NETWORK) as store:
            store.push(repository.folder, MODEL)
            written = store.deploy(scratch / "deploy", "--cores", str(CORES))
            return _play(engine, repository, written["deployment"], scratch)
    finally:
        engine.podman("pod", "rm", "--all", "--force")
        engine.podman("volume", "prune", "--force")


def _play(engine: Engine, repository: Repository, deployment: Document, scratch: Path) -> str:
    containers = deployment["spec"]["template"]["spec"]["initContainers"]
    live = next(one for one in containers if one["name"] == "triton")["livenessProbe"]["exec"]["command"]
    documents, changes = playable(deployment, POD)
    file = scratch / "pod.yaml"
    file.write_text(yaml.safe_dump_all(documents), "utf-8")
    engine.podman("kube", "play", "--network", NETWORK, file)
    server, gateway = (Container(engine, f"{POD}-{name}") for name in ("triton", "gateway"))
    server.wait(READY)
    gateway.wait(GATEWAY_READY)
    engine.podman("exec", server.name, *live)
    load = ask_all(address_of_pod(engine, POD, NETWORK), GATEWAY_PORT, repository.answers)
    load.require(len(repository.answers.texts))
    return f"{load}; {memory(server)}; its liveness probe passes; changed for podman: {'; '.join(changes)}"


def address_of_pod(engine: Engine, pod: str, network: str) -> str:
    """Return the address of a pod in a network."""
    infra = engine.podman("pod", "inspect", "--format", "{{.InfraContainerID}}", pod).strip()
    return Container(engine, infra).address(network)

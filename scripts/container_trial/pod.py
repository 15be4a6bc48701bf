"""A pod of pull, Triton and gateway by `podman kube play`, from the manifest that `build-repo deploy` writes."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import boto3
import yaml
from moto.server import ThreadedMotoServer

from builder.clusters.deploy.pod import GATEWAY_PORT
from builder.repository.config.arguments import USER, arguments
from builder.serving.server.embedded import EMBEDDED
from scripts.container_trial.containers import Container
from scripts.container_trial.engine import NETWORK, Engine
from scripts.container_trial.images import GATEWAY, PULL, TRITON
from scripts.container_trial.repository import CORES, Repository, build_repo
from scripts.container_trial.serve import GATEWAY_READY, READY, memory
from scripts.container_trial.traffic import MODEL, ask_all

POD, STORE, SECRET = "models", "s3://models", "store-credentials"
MODELS, SHM = "models", "shm"  # volumes: what the pull fills, and /dev/shm
IMAGES = {"triton": TRITON, "gateway": GATEWAY, "pull": PULL}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "trial", "AWS_SECRET_ACCESS_KEY": "trial", "AWS_DEFAULT_REGION": "us-east-1"}
ONLY_KUBERNETES = (  # fields of a pod, or of a container, that podman 4.3 ignores, or takes for something else
    "topologySpreadConstraints",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",  # its script would be cut into words; it runs by itself below
    "lifecycle",
    "ports",  # would be published on the machine
)
KEPT = {"io.podman.annotations.init.container.type": "always"}  # podman 4.3 fails to remove the pull on a busy machine
Document = dict[str, Any]


def pod(engine: Engine, repository: Repository, scratch: Path) -> str:
    """Push the model to an S3 store, deploy it from there as a pod, and ask its gateway. Raises TrialError."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to the store
    host = json.loads(engine.podman("network", "inspect", NETWORK))[0]["subnets"][0]["gateway"]
    store = ThreadedMotoServer("0.0.0.0", 0, verbose=False)  # the bridge has an address only while a container runs
    store.start()
    try:
        deployment = _deploy(repository, scratch, host, store.get_host_and_port()[1])
        return _play(engine, repository, deployment, scratch)
    finally:
        engine.podman("pod", "rm", "--all", "--force")
        engine.podman("volume", "prune", "--force")
        store.stop()


def _play(engine: Engine, repository: Repository, deployment: Document, scratch: Path) -> str:
    containers = deployment["spec"]["template"]["spec"]["initContainers"]
    live = next(one for one in containers if one["name"] == "triton")["livenessProbe"]["exec"]["command"]
    documents, changes = playable(deployment)
    file = scratch / "pod.yaml"
    file.write_text(yaml.safe_dump_all(documents), "utf-8")
    engine.podman("kube", "play", "--network", NETWORK, file)
    server, gateway = (Container(engine, f"{POD}-{name}") for name in ("triton", "gateway"))
    server.wait(READY)
    gateway.wait(GATEWAY_READY)
    engine.podman("exec", server.name, *live)
    infra = engine.podman("pod", "inspect", "--format", "{{.InfraContainerID}}", POD).strip()
    load = ask_all(Container(engine, infra).address(NETWORK), GATEWAY_PORT, repository.answers)
    load.require(len(repository.answers.texts))
    return f"{load}; {memory(server)}; its liveness probe passes; changed for podman: {'; '.join(changes)}"


def playable(deployment: Document) -> tuple[list[Document], list[str]]:
    """Return the pod of a Deployment as podman can play it, after its volumes, and the changes in words."""
    template = deployment["spec"]["template"]
    spec = template["spec"]
    triton = next(container for container in spec["initContainers"] if container.pop("restartPolicy", None))
    spec["initContainers"].remove(triton)
    spec["containers"].insert(0, triton)
    removed = [word for word in triton["args"] if word not in arguments(EMBEDDED)]
    triton["args"] = [word for word in triton["args"] if word not in removed]
    for mount in triton["volumeMounts"]:
        if "subPath" in mount:  # ignored
            triton["args"].insert(0, f"--model-repository={mount['mountPath']}/{mount.pop('subPath')}")
            triton["args"].remove(f"--model-repository={mount['mountPath']}")
    parts = [spec, *spec["initContainers"], *spec["containers"]]
    fields = [field for field in ONLY_KUBERNETES if any(field in part for part in parts)]
    for part, field in itertools.product(parts, fields):
        part.pop(field, None)
    for container in parts[1:]:
        container["image"] = IMAGES[container["name"]]
        if container.pop("envFrom", None):
            container["env"] += [{"name": name, "value": value} for name, value in CREDENTIALS.items()]
    for container in parts[1:]:
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != SHM]
    names = [volume["name"] for volume in spec["volumes"] if volume["name"] != SHM]
    spec["volumes"] = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in names]
    metadata = {"name": POD, "labels": template["metadata"]["labels"], "annotations": KEPT}
    changes = [
        "one pod of the Deployment, with the images built here",
        "the sidecar is a container",
        "/dev/shm is the pod's own, and other volumes without limits",
        "the secret's entries are variables",
        "subPath is part of the repository's path",
        f"without {', '.join([*fields, *removed])}",
    ]
    return [*map(_claim, names), {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}], changes


def _claim(name: str) -> Document:
    """Return a claim of which podman makes a tmpfs, or a folder of the user.

    Podman unmounts a tmpfs with its last container, and pulled models must outlive the pull.
    """
    user = {"volume.podman.io/uid": str(USER), "volume.podman.io/gid": str(USER)}
    tmpfs = {"volume.podman.io/type": "tmpfs", "volume.podman.io/device": "tmpfs"}
    options = {"volume.podman.io/mount-options": "mode=1777"}
    metadata = {"name": name, "annotations": user if name == MODELS else {**tmpfs, **options}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _deploy(repository: Repository, scratch: Path, host: str, port: int) -> Document:
    """Return the Deployment that `build-repo deploy` writes for the model, pushed to the store at `port`.

    `host`: this machine's address for containers.
    """
    endpoint = f"http://127.0.0.1:{port}"
    variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
    names = {name.lower(): value for name, value in CREDENTIALS.items() if name != "AWS_DEFAULT_REGION"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name=CREDENTIALS["AWS_DEFAULT_REGION"], **names)
    client.create_bucket(Bucket=STORE.removeprefix("s3://"))
    build_repo("push", MODEL, "--repository", repository.folder, "--to", STORE, **variables)
    options = [
        "--to",
        "kubernetes",
        "--repository",
        STORE,
        "--endpoint",
        f"http://{host}:{port}",
        "--cores",
        str(CORES),
    ]
    secret = ["--store-secret", SECRET, "--registry", "localhost"]
    build_repo("deploy", *options, *secret, "--output", scratch / "deploy", **variables)
    document: Document = yaml.safe_load((scratch / "deploy" / "deployment.yaml").read_text("utf-8"))
    return document

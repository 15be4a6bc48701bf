"""Deployments that `build-repo deploy` writes, as pods that podman can play."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml
from moto.server import ThreadedMotoServer

from builder.repository.config.arguments import USER, arguments
from builder.serving.server.embedded import EMBEDDED
from scripts.container_trial.engine import Engine
from scripts.container_trial.images import GATEWAY, PULL, TRITON
from scripts.container_trial.repository import build_repo

STORE, SECRET = "s3://models", "store-credentials"
MODELS, SHM = "models", "shm"  # volumes: what the pull fills, and /dev/shm
IMAGES = {"triton": TRITON, "gateway": GATEWAY, "pull": PULL}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "trial", "AWS_SECRET_ACCESS_KEY": "trial", "AWS_DEFAULT_REGION": "us-east-1"}
ONLY_KUBERNETES = (  # fields of a pod, or of a container, that podman 4.3 ignores, or takes for something else
    "topologySpreadConstraints",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",  # its script would be cut into words; the trial runs it by itself
    "lifecycle",
    "ports",  # would be published on the machine
)
KEPT = {"io.podman.annotations.init.container.type": "always"}  # podman 4.3 fails to remove the pull on a busy machine
Document = dict[str, Any]


@dataclass(frozen=True)
class Store:
    """S3 store of this process. `endpoint`: its address for containers; `variables`: for commands of this machine."""

    endpoint: str
    variables: Mapping[str, str]

    def push(self, repository: Path, *names: str) -> None:
        """Push models of a repository. Raises TrialError."""
        for name in names:
            build_repo("push", name, "--repository", repository, "--to", STORE, **self.variables)

    def deploy(self, output: Path, *options: str | Path) -> dict[str, Document]:
        """Return the documents that `build-repo deploy` writes for the store, by file. Raises TrialError."""
        words = ["--to", "kubernetes", "--repository", STORE, "--endpoint", self.endpoint]
        secret = ["--store-secret", SECRET, "--registry", "localhost"]
        build_repo("deploy", *words, *secret, *options, "--output", output, **self.variables)
        return {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in output.glob("*.yaml")}


@contextmanager
def s3_store(engine: Engine, network: str) -> Iterator[Store]:
    """Yield an empty store for the containers of a network."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request to the store
    server = ThreadedMotoServer("0.0.0.0", 0, verbose=False)  # the bridge has an address only while a container runs
    server.start()
    try:
        port = server.get_host_and_port()[1]
        here = f"http://127.0.0.1:{port}"
        names = {name.lower(): value for name, value in CREDENTIALS.items() if name != "AWS_DEFAULT_REGION"}
        client = boto3.client("s3", endpoint_url=here, region_name=CREDENTIALS["AWS_DEFAULT_REGION"], **names)
        client.create_bucket(Bucket=STORE.removeprefix("s3://"))
        yield Store(f"http://{address_of_machine(engine, network)}:{port}", {**CREDENTIALS, "AWS_ENDPOINT_URL": here})
    finally:
        server.stop()


def address_of_machine(engine: Engine, network: str) -> str:
    """Return the address of this machine for the containers of a network."""
    return str(json.loads(engine.podman("network", "inspect", network))[0]["subnets"][0]["gateway"])


def playable(deployment: Document, pod: str) -> tuple[list[Document], list[str]]:
    """Return a pod of a Deployment as podman can play it, after its volumes, and the changes in words."""
    template = deployment["spec"]["template"]
    spec, changes = template["spec"], ["one pod of the Deployment, with the images built here"]
    for sidecar in [container for container in spec["initContainers"] if container.pop("restartPolicy", None)]:
        spec["initContainers"].remove(sidecar)
        spec["containers"].insert(0, sidecar)
        changes.append("the sidecar is a container")
    containers = [*spec["initContainers"], *spec["containers"]]
    removed = [word for triton in spec["containers"] if triton["name"] == "triton" for word in _remove_unknown(triton)]
    fields = [field for field in ONLY_KUBERNETES if any(field in part for part in (spec, *containers))]
    for part, field in itertools.product((spec, *containers), fields):
        part.pop(field, None)
    for container in containers:
        _change(container)
    volumes = [volume for volume in spec["volumes"] if volume["name"] != SHM]
    claims = [_claim(pod, volume) for volume in volumes]
    spec["volumes"] = [
        {"name": volume["name"], "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        for volume, claim in zip(volumes, claims, strict=True)
    ]
    spec["restartPolicy"] = "OnFailure"  # Always applies to init containers too, which would run again and again
    metadata = {"name": pod, "labels": template["metadata"]["labels"], "annotations": KEPT}
    changes += [
        "/dev/shm is the pod's own, and other volumes without limits",
        "the secret's entries are variables",
        "subPath is part of the path of the repository",
        "restartPolicy is OnFailure",
        f"without {', '.join([*fields, *removed])}",
    ]
    return [*claims, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}], changes


def _remove_unknown(triton: Document) -> list[str]:
    """Remove the arguments that the release of the stand-in does not know, and return them."""
    known = {*arguments(EMBEDDED), *arguments(EMBEDDED, on_demand=True)}
    removed = [word for word in triton["args"] if word not in known]
    triton["args"] = [word for word in triton["args"] if word in known]
    return removed


def _change(container: Document) -> None:
    """Give a container the image built here, the entries of its secret, and the paths of what it mounts."""
    container["image"] = IMAGES[container["name"]]
    if container.pop("envFrom", None):
        container["env"] += [{"name": name, "value": value} for name, value in CREDENTIALS.items()]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != SHM]
    for mount in container["volumeMounts"]:
        if "subPath" in mount:  # ignored
            folder, whole = mount["mountPath"], f"{mount['mountPath']}/{mount.pop('subPath')}"
            container["args"] = [
                f"{option}={whole}" if value == folder else word
                for word in container["args"]
                for option, _, value in [word.partition("=")]
            ]


def _claim(pod: str, volume: Document) -> Document:
    """Return a claim of which podman makes a tmpfs, or a folder of the user; a claim of the pod's own has its name.

    Podman unmounts a tmpfs with its last container, and pulled models must outlive the pull.
    """
    user = {"volume.podman.io/uid": str(USER), "volume.podman.io/gid": str(USER)}
    tmpfs = {"volume.podman.io/type": "tmpfs", "volume.podman.io/device": "tmpfs"}
    options = {"volume.podman.io/mount-options": "mode=1777"}
    name = volume.get("persistentVolumeClaim", {}).get("claimName", f"{pod}-{volume['name']}")
    metadata = {"name": name, "annotations": user if volume["name"] == MODELS else {**tmpfs, **options}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}

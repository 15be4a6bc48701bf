"""Pod of a replica: the pull of the models, Triton, and the gateway in front of it.

Triton is a sidecar (an init container that stays, Kubernetes 1.29 and later): it starts before the gateway, and is told
to stop only when the gateway has finished its requests, so no accepted request is lost. Sources:
https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/ and .../pods/pod-lifecycle/
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.image import build_command, image_tag
from builder.clusters.deploy.placement import placement
from builder.clusters.deploy.probes import live_probe, ready_probe
from builder.common.distribution import own_version, sources_folder
from builder.common.errors import SpecError
from builder.common.telemetry import OFF
from builder.repository.config.arguments import (
    EXIT_TIMEOUT_S,
    GRPC_PORT,
    HTTP_PORT,
    METRICS_PORT,
    MODELS_FOLDER,
    USER,
    arguments,
    arguments_of_backend,
    command,
)
from builder.serving.gateway.settings import DEFAULT_PORT, GatewaySettings

GATEWAY_PORT = DEFAULT_PORT
MIN_KUBERNETES = "1.30"  # the first Kubernetes that by default has sidecars and a preStop that sleeps
NOBODY_UID = 65534  # the user of the images of the gateway and the pull
PRESTOP_SLEEP_S = 10  # until all proxies know that the pod is shutting down
GATEWAY_DRAIN_S = round(GatewaySettings().drain_s)
START_TIMEOUT_S, GPU_START_TIMEOUT_S = 300, 1800  # to load the models; with a GPU, to compile engines first
STARTUP_PROBE_PERIOD_S = 5
LOAD_BYTES_PER_S = 50_000_000  # large models get longer to load: a slow disk on a machine's network
PULL_TIMEOUT_S = 900  # to fetch images of gigabytes, and the models
TRUSTED, TRUSTED_KEY = "/trusted", "key.pem"  # where the pull finds the key that models must be signed with
LOGIN = "/login"  # where the pull finds docker's settings with the login of a registry
CACHED_ENGINES = "/engines"  # where ONNX Runtime's TensorRT keeps compiled engines, in the image
HOME = "/home-of-engine"  # of an engine that runs whole checkpoints: what it downloads and compiles
GATEWAY_CPU, GATEWAY_MEMORY = "500m", 512 << 20  # one event loop; 94 MB were measured with 1,000 idle connections
# 148 MiB were measured; eight pieces of 8 MiB in flight, and a graph to check
PULL_CPU, PULL_MEMORY = "500m", 1 << 30
PULL_MARGIN = 64 << 20  # bytes of a volume for configurations and folders
Document = dict[str, Any]
PULLED_MODELS: Document = {"name": "models", "mountPath": MODELS_FOLDER, "subPath": "models", "readOnly": True}


def labels(deployment: Deployment) -> Document:
    """Return the labels of its pods.

    Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/
    """
    return {"app.kubernetes.io/name": "build-repo", "app.kubernetes.io/instance": deployment.name}


def pod(deployment: Deployment) -> Document:
    """Return the spec of a pod. Raises SpecError if the deployment names no registry."""
    sidecar = {**triton(deployment), "restartPolicy": "Always"}
    return {
        **pod_settings(deployment, PRESTOP_SLEEP_S + GATEWAY_DRAIN_S + EXIT_TIMEOUT_S),
        "initContainers": [*pulls(deployment), sidecar],
        "containers": [gateway(deployment, f"--url=127.0.0.1:{GRPC_PORT}")],
        "volumes": volumes(deployment),
    }


def pod_settings(deployment: Deployment, stop_s: int) -> Document:
    """Return the settings of a pod that apply to all of its containers, which stop within `stop_s` seconds."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": stop_s + 10,
        "securityContext": pod_security(),
        "topologySpreadConstraints": spread(deployment),
        **placement(deployment),
    }


def pod_security() -> Document:
    """Return the pod's security context.

    The Pod Security Standard `restricted`: https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    return {"runAsNonRoot": True, "fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security(user: int) -> Document:
    """Return a container's security context for `restricted`, with a read-only file system."""
    return {
        "runAsUser": user,
        "runAsGroup": user,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def spread(deployment: Deployment) -> list[Document]:
    """Return constraints that spread pods over zones and machines, as far as there are several."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels(deployment)},
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


def image(deployment: Deployment, kind: str) -> str:
    """Return the image of a container: `triton`, `gateway`, `pull` or `ray`.

    Raises SpecError if neither the image nor a registry was named.
    """
    named: str | None = getattr(deployment.pod.images, kind)
    if named is not None:
        return named
    if deployment.registry is None:
        raise SpecError(
            f"say where the cluster gets the image of {kind} from: --registry HOST/PATH, or `pod: {{images: {{{kind}: "
            "HOST/PATH@sha256:DIGEST}}` in the models.yaml of --pod"
        )
    name = f"{deployment.name}-triton" if kind == "triton" else f"build-repo-{kind}"
    own = image_tag(deployment) if kind == "triton" else own_version()
    return f"{deployment.registry.rstrip('/')}/{name}:{own}"


def image_steps(deployment: Deployment, output: Path, own: Sequence[str] = ("gateway",)) -> list[str]:
    """Return the commands that bring the images to the registry, except those that the user named.

    `own`: images of the project that run beside Triton's; with that of the pull they are built from its sources.
    """
    steps, sources = [], sources_folder()
    for kind in (*own, *(["pull"] if deployment.stored else [])):
        if getattr(deployment.pod.images, kind) is None:
            name = image(deployment, kind)
            steps.append(f"docker build --tag {name} --file {sources}/Dockerfile.{kind} {sources}  # once a version")
            steps.append(f"docker push {name}")
    if deployment.pod.images.triton is None:
        name = image(deployment, "triton")
        steps += [build_command(deployment, name, output), f"docker push {name}"]
    return steps


def pulls(deployment: Deployment, with_weights: bool = True) -> list[Document]:
    """Return the container that pulls models: one version of each, the same for all replicas.

    Without weights it pulls what a gateway reads, unless signatures are to be verified, which needs all files.
    """
    if not deployment.stored:
        return []
    names = [f"{model.name}@{model.version}" for model in deployment.models]
    container: Document = {
        "name": "pull",
        "image": image(deployment, "pull"),
        "args": [*names, f"--from={deployment.repository}", "--repository=/pulled/models"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": container_security(USER),
        "resources": {"requests": {"cpu": PULL_CPU, "memory": PULL_MEMORY}, "limits": {"memory": PULL_MEMORY}},
        "volumeMounts": [{"name": "models", "mountPath": "/pulled"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    if (pulled := _pulled(deployment, with_weights)) is not None:  # counts for the pod as long as it lives
        container["resources"]["requests"]["ephemeral-storage"] = pulled
    if not _pulls_whole(deployment, with_weights):
        container["args"].append("--without-weights")
    if deployment.trusted is not None:
        container["args"].append(f"--verify-key={TRUSTED}/{TRUSTED_KEY}")
        container["volumeMounts"].append({"name": "trusted", "mountPath": TRUSTED, "readOnly": True})
    if deployment.endpoint is not None:
        container["env"].append({"name": "AWS_ENDPOINT_URL", "value": deployment.endpoint})
    if deployment.login is not None:
        container["env"].append({"name": "DOCKER_CONFIG", "value": LOGIN})
        container["volumeMounts"].append({"name": "login", "mountPath": LOGIN, "readOnly": True})
    elif deployment.secrets.store is not None:
        container["envFrom"] = [{"secretRef": {"name": deployment.secrets.store}}]
    return [container]


def _pulled(deployment: Deployment, with_weights: bool) -> int | None:
    """Return the bytes that a pod pulls to its own disk; None if they are unknown, or go to a claim."""
    if deployment.pulled is None or _claims_models(deployment, with_weights):
        return None
    return deployment.pulled.whole if _pulls_whole(deployment, with_weights) else deployment.pulled.described


def _pulls_whole(deployment: Deployment, with_weights: bool) -> bool:
    return with_weights or deployment.trusted is not None


def _claims_models(deployment: Deployment, with_weights: bool) -> bool:
    """Return True if a pod has its models on a claim, which has whole models alone."""
    return deployment.pod.models_claim is not None and _pulls_whole(deployment, with_weights)


def triton(deployment: Deployment) -> Document:
    """Return the server's container, with the arguments and the numbers of docker-compose.yml."""
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]
    if deployment.stored:
        mounts.append(PULLED_MODELS)
    if deployment.on_gpu:
        mounts.append({"name": "cache", "mountPath": HOME if deployment.runs_checkpoints else CACHED_ENGINES})
    own = {"HOME": HOME} if deployment.runs_checkpoints else {}
    hub = {} if deployment.secrets.hub is None else {"envFrom": [{"secretRef": {"name": deployment.secrets.hub}}]}
    security = container_security(USER)
    security["readOnlyRootFilesystem"] = not deployment.runs_checkpoints  # it compiles kernels where it likes
    return {
        "name": "triton",
        "image": image(deployment, "triton"),
        "command": command(),
        "args": (
            arguments_of_backend(deployment.release)
            if deployment.runs_checkpoints
            else arguments(deployment.release, deployment.size.response_cache, deployment.on_demand is not None)
        ),
        "env": [
            {"name": name, "value": value} for name, value in {"PYTHONDONTWRITEBYTECODE": "1", **OFF, **own}.items()
        ],
        **hub,
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT},
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "startupProbe": {
            **ready_probe(replace(deployment, probed=())),
            "periodSeconds": STARTUP_PROBE_PERIOD_S,
            "failureThreshold": start_timeout_s(deployment) // STARTUP_PROBE_PERIOD_S,
        },
        "readinessProbe": {**ready_probe(deployment), "periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": live_probe(deployment),
        "securityContext": security,
        "resources": resources(deployment),
        "volumeMounts": mounts,
    }


def start_timeout_s(deployment: Deployment) -> int:
    """Return the seconds that a server may take to load its models."""
    steps = math.ceil(deployment.size.memory / LOAD_BYTES_PER_S / STARTUP_PROBE_PERIOD_S)
    return (GPU_START_TIMEOUT_S if deployment.on_gpu else START_TIMEOUT_S) + STARTUP_PROBE_PERIOD_S * steps


def resources(deployment: Deployment) -> Document:
    """Return the resources of the plan.

    Files in /dev/shm count as memory of the process that wrote them, so the limit includes them.
    """
    size = deployment.size
    gpu = {"nvidia.com/gpu": max(1, size.gpus)} if deployment.on_gpu else {}
    return {
        "requests": {"cpu": size.cores, "memory": size.memory, **gpu},
        "limits": {"cpu": size.cores, "memory": size.memory + size.burst + size.shm, **gpu},
    }


def gateway(deployment: Deployment, *tritons: str) -> Document:
    """Return the container of the one port for clients; it is ready while one of its `tritons` is (its options)."""
    health = {"periodSeconds": 5, "timeoutSeconds": 3}
    container: Document = {
        "name": "gateway",
        "image": image(deployment, "gateway"),
        "args": [*tritons, "--host=0.0.0.0", f"--port={GATEWAY_PORT}"],
        "ports": [{"name": "gateway", "containerPort": GATEWAY_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health/ready", "port": "gateway"}, **health},
        "livenessProbe": {"httpGet": {"path": "/health", "port": "gateway"}, **health, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SLEEP_S}}},
        "securityContext": container_security(NOBODY_UID),
        "resources": {
            "requests": {"cpu": GATEWAY_CPU, "memory": GATEWAY_MEMORY},
            "limits": {"memory": GATEWAY_MEMORY},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    if deployment.pooled:
        container["args"].append(f"--triton-metrics=http://127.0.0.1:{METRICS_PORT}/metrics")
    if deployment.secrets.keys is not None:
        key = {"secretKeyRef": {"name": deployment.secrets.keys, "key": "keys"}}
        container["env"] = [{"name": "BUILD_REPO_GATEWAY_KEYS", "valueFrom": key}]
    return container


def volumes(deployment: Deployment) -> list[Document]:
    """Return /dev/shm of the plan's size, /tmp, and the volumes for pulled models and what is compiled."""
    shm = {"medium": "Memory", "sizeLimit": deployment.size.shm}
    entries: list[Document] = [{"name": "shm", "emptyDir": shm}, *pull_volumes(deployment)]
    if deployment.on_gpu:
        claim = deployment.pod.cache_claim
        kind = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
        entries.append({"name": "cache", **kind})
    return entries


def pull_volumes(deployment: Deployment, with_weights: bool = True) -> list[Document]:
    """Return /tmp, and the volumes of a pull."""
    entries: list[Document] = [{"name": "tmp", "emptyDir": {}}]
    if deployment.stored:
        pulled = _pulled(deployment, with_weights)
        limit = {} if pulled is None else {"sizeLimit": 2 * pulled + PULL_MARGIN}  # without links, the pull copies
        claim = {"persistentVolumeClaim": {"claimName": deployment.pod.models_claim}}
        kind = claim if _claims_models(deployment, with_weights) else {"emptyDir": limit}
        entries.append({"name": "models", **kind})
    if deployment.login is not None:
        items = [{"key": ".dockerconfigjson", "path": "config.json"}]  # of the type kubernetes.io/dockerconfigjson
        entries.append({"name": "login", "secret": {"secretName": deployment.login, "items": items}})
    if deployment.trusted is not None:
        entries.append({"name": "trusted", "configMap": {"name": trusted_name(deployment)}})
    return entries


def trusted_name(deployment: Deployment) -> str:
    """Return the name of the ConfigMap with the key that pulled models must be signed with."""
    return f"{deployment.name}-trusted"

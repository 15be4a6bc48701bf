"""Ray: a Serve configuration for `serve deploy`, and for Kubernetes a RayService of KubeRay with it.

Each replica is the embedded Triton on a node of the Ray cluster (builder/clusters/ray), so a node's image is this
project with its extra `ray`. Ray's own proxies do not run. Gateways listen where KubeRay expects a proxy, and answer
its probes. Sources: https://docs.ray.io/en/latest/serve/production-guide/config.html and
https://docs.ray.io/en/latest/cluster/kubernetes/getting-started/rayservice-quick-start.html
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.clusters.deploy import pod
from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.objects import document, trusted
from builder.clusters.deploy.placement import placement
from builder.clusters.deploy.pod import NOBODY_UID, Document
from builder.clusters.deploy.targets import Target, to_yaml
from builder.clusters.ray.cluster import OBJECT_STORE_BYTES, RAY_SETTINGS, RAY_TIMEOUTS, RayOptions
from builder.common.errors import SpecError
from builder.common.telemetry import OFF
from builder.options import PodOptions

RAY_VERSION = "2.60.0"
BASE = "python:3.11-slim-bookworm"
PORT = 8000  # of gateways: KubeRay's service leads there
DASHBOARD_PORT = 8265  # of the head node, where KubeRay's operator sends the configuration
SERVICE, NETWORK, CONFIG = "rayservice.yaml", "network.yaml", "serve.yaml"
KEYS = "/keys"
OBJECT_STORE = {"object-store-memory": str(OBJECT_STORE_BYTES)}
HEAD_CORES, HEAD_MEMORY = 2, 4 << 30  # the head node has no replica: Ray's own processes
RAY_CORES, RAY_MEMORY = 1, 2 << 30  # beside a replica: Ray's own processes and a gateway


def _files(deployment: Deployment) -> dict[str, str]:
    _refuse(deployment)
    config = to_yaml(_config(deployment))
    if deployment.registry is None:
        return {CONFIG: config}
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": deployment.name, "namespace": deployment.namespace, "labels": pod.labels(deployment)},
        "spec": {"serveConfigV2": config, "rayClusterConfig": _cluster(deployment)},
    }
    beside = {f"{name}.yaml": to_yaml(keys) for name, keys in trusted(deployment).items()}
    beside[NETWORK] = to_yaml(_network_policy(deployment))
    return {CONFIG: config, SERVICE: to_yaml(service), **beside, "image/Containerfile": _containerfile(deployment)}


def _refuse(deployment: Deployment) -> None:
    """Raise SpecError for what the target does not have."""
    if deployment.on_gpu:
        raise SpecError("the replicas on Ray are the embedded Triton, which has no GPU: deploy --to kubernetes instead")
    if deployment.probed or deployment.monitored or deployment.pooled:
        raise SpecError(
            "--probe, --monitor and --inference-pool are of pods with a Triton each, which the target ray does not "
            "have: Ray looks after its replicas, and publishes their metrics, itself"
        )
    if deployment.on_demand is not None:
        raise SpecError(
            "--load-on-demand is not of the target ray, whose gateways load nothing: deploy --to kubernetes, or run "
            "build-repo serve --ray --load-on-demand on the cluster"
        )
    if deployment.registry is None and deployment.pod != PodOptions():
        raise SpecError("`pod:` is for KubeRay's pods: give --registry HOST, or remove it for Ray on machines")
    if deployment.registry is None and deployment.trusted is not None:
        raise SpecError("--verify-key is for the pull of KubeRay's nodes: on machines verify the folder that they have")
    if deployment.registry is not None and not deployment.stored:
        raise SpecError("KubeRay's nodes pull their models: --repository s3://...; on machines leave out --registry")


def _config(deployment: Deployment) -> Document:
    """Return the document of `serve deploy`: https://docs.ray.io/en/latest/serve/api/index.html (ServeDeploySchema)."""
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": deployment.name,
                "import_path": "builder.clusters.ray.application:application",
                "args": _options(deployment).model_dump(exclude_defaults=True),
            }
        ],
    }


def _options(deployment: Deployment) -> RayOptions:
    """Return options by which a replica has memory for all models; Ray starts more replicas when they are busy.

    The nodes of KubeRay have a gateway each. On machines, replicas may share a node, which has one gateway at most.
    """
    max_replicas = deployment.scaling.max_replicas if deployment.scaling else deployment.replicas
    repository = "/pulled/models" if deployment.stored else str(Path(deployment.repository).resolve())
    return RayOptions(
        repository=repository,
        min_replicas=deployment.replicas,
        max_replicas=max_replicas,
        cores=deployment.size.cores,
        memory=deployment.size.memory,
        insecure_bind=True,
        gateways=1 if deployment.registry is None else deployment.replicas,
        host="0.0.0.0",
        port=PORT,
        keys_file=f"{KEYS}/keys" if deployment.secrets.keys else None,
        models={f"{model.name}@{model.version}": model.digest for model in deployment.models},
    )


def _network_policy(deployment: Deployment) -> Document:
    """Return the policy that lets only the cluster's own nodes reach its Tritons, which ask for no key.

    Everyone reaches the gateways, and the dashboard, which asks for the cluster's token.
    """
    selector = {"matchLabels": pod.labels(deployment)}
    ingress = [{"from": [{"podSelector": selector}]}, {"ports": [{"port": PORT}, {"port": DASHBOARD_PORT}]}]
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return document(deployment, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _cluster(deployment: Deployment) -> Document:
    """Return a head node, and as many workers as there are replicas, one on each."""
    size, replicas = deployment.size, deployment.replicas
    max_replicas = deployment.scaling.max_replicas if deployment.scaling else replicas
    head = {"cpu": HEAD_CORES, "memory": HEAD_MEMORY}
    worker = {"cpu": size.cores + RAY_CORES, "memory": size.memory + size.shm + OBJECT_STORE_BYTES + RAY_MEMORY}
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},  # KubeRay makes one; whoever reached the dashboard without could run code
        "enableInTreeAutoscaling": max_replicas > replicas,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **OBJECT_STORE},
            "template": _template(deployment, "head", head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "triton",
                "replicas": replicas,
                "minReplicas": replicas,
                "maxReplicas": max_replicas,
                "rayStartParams": {"num-cpus": str(size.cores), "memory": str(size.memory), **OBJECT_STORE},
                "template": _template(deployment, "worker", worker),
            }
        ],
    }


def _template(deployment: Deployment, name: str, resources: dict[str, int]) -> Document:
    """Return the pod of a node. KubeRay adds `ray start`, its ports and its probes."""
    mounts: list[Document] = [
        {"name": "models", "mountPath": "/pulled"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    size = replace(deployment.size, shm=deployment.size.shm + OBJECT_STORE_BYTES)
    volumes = pod.volumes(replace(deployment, size=size))
    if deployment.secrets.keys is not None:
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": deployment.secrets.keys}})
    variables = {**OFF, **RAY_SETTINGS, **RAY_TIMEOUTS, "HOME": "/tmp"}
    container = {
        "name": f"ray-{name}",
        "image": pod.image(deployment, "ray"),
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "securityContext": {**pod.container_security(NOBODY_UID), "readOnlyRootFilesystem": False},
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
    }
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod.pod_security(),
        "initContainers": pod.pulls(deployment),
        "containers": [container],
        "volumes": volumes,
        **placement(deployment),
    }
    return {"metadata": {"labels": pod.labels(deployment)}, "spec": spec}


def _containerfile(deployment: Deployment) -> str:
    """Return the Containerfile of a node, built where this project's sources are. KubeRay's probes call wget."""
    lines = [
        "# A node of a Ray cluster that serves, and builds, with build-repo. Build it in the project's folder.",
        f"FROM {deployment.pod.images.base or BASE}",
        "RUN apt-get update && apt-get install --yes --no-install-recommends wget libb64-0d && apt-get clean",
        "COPY . /opt/build-repo",
        "WORKDIR /opt/build-repo",
        "RUN pip install --no-cache-dir --constraint constraints.txt '.[limits,openvino,ray,stores]'",
        f"USER {NOBODY_UID}:{NOBODY_UID}",
    ]
    return "\n".join([*lines, ""])


def _steps(deployment: Deployment, output: Path) -> list[str]:
    if deployment.registry is None:
        return [f"serve deploy {output / CONFIG}"]
    image = pod.image(deployment, "ray")
    build = [f"docker build --tag {image} --file {output}/image/Containerfile .", f"docker push {image}"]
    files = [NETWORK, SERVICE, *(f"{name}.yaml" for name in trusted(deployment))]
    return [
        *(build if deployment.pod.images.ray is None else ()),
        *(f"kubectl apply --namespace {deployment.namespace} --filename {output / file}" for file in files),
    ]


TARGET = Target(_files, _steps)

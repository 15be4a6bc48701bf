"""What is to be deployed, as every target is told."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from builder.addresses import is_address
from builder.errors import SpecError
from builder.plan.lines import Plan
from builder.report.record import BuildReport

# What Kubernetes takes: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # with room for what names are made of it
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
# A host and a path, as in the names of images: https://pkg.go.dev/github.com/distribution/reference
REGISTRY = re.compile(r"[A-Za-z0-9][-.A-Za-z0-9]*(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*/?")


@dataclass(frozen=True)
class Model:
    """A model of the repository. `plan`: what it takes; `generates`: whether it has a decode loop, with a queue of its
    own; `request`: the JSON of a small one, for Triton's generate endpoint; `digest`: of its files and
    configurations, or of those that a shared front answers for.
    """

    name: str
    version: int
    entries: tuple[str, ...]  # its folders: the front and, where that is one, the engine
    release: str  # of Triton, that it was built for
    target: str  # cpu, cuda or tensorrt
    generates: bool
    request: str
    plan: Plan
    digest: str


def digest(reports: Iterable[BuildReport], configs: Sequence[ModelConfig]) -> str:
    """One hash of all files that are served, and of what `configs` say but for their version_policy: another version,
    another build of the same number, and another number of instances have another.
    """
    files = [report.files for report in sorted(reports, key=lambda report: report.name)]
    said = [_without_policy(config).SerializeToString(deterministic=True).hex() for config in configs]
    return hashlib.sha256(json.dumps([files, said], sort_keys=True).encode()).hexdigest()


def _without_policy(config: ModelConfig) -> ModelConfig:
    rest = ModelConfig()
    rest.CopyFrom(config)
    rest.ClearField("version_policy")
    return rest


@dataclass(frozen=True)
class Size:
    """What one replica takes. `memory`: resident bytes of Triton; `shm`, `response_cache`: bytes; `gpus`: cards."""

    cores: int
    memory: int
    shm: int
    response_cache: int
    gpus: int = 0


@dataclass(frozen=True)
class Scaling:
    """Up to `most` replicas, by the milliseconds that requests wait, as the Prometheus at `prometheus` says."""

    most: int
    prometheus: str
    queue_ms: int


@dataclass(frozen=True)
class Secrets:
    """Names of the cluster's own secrets: `keys`, who may ask the gateway; `store`, environment for the pull."""

    keys: str | None = None
    store: str | None = None


@dataclass(frozen=True)
class Deployment:
    """`repository`: a folder, or the address of an object store; `registry`: where the images are, None where no target
    asked; `endpoint`: of the object store, where it is not the scheme's own; `trusted`: the public key, or the
    certificates, that pulled models must be signed with (PEM); `probed`: models that replicas are asked for;
    `monitored`: whether Prometheus' operator is there; `pooled`: whether an inference gateway chooses the replica.
    """

    name: str
    repository: str
    stored: bool  # in an object store
    models: tuple[Model, ...]
    size: Size
    replicas: int = 2
    namespace: str = "default"
    registry: str | None = None
    endpoint: str | None = None
    trusted: str | None = None
    scaling: Scaling | None = None
    secrets: Secrets = Secrets()
    probed: tuple[str, ...] = ()
    monitored: bool = False
    pooled: bool = False

    @property
    def release(self) -> str:
        """The Triton release of all its models."""
        return self.models[0].release

    @property
    def on_gpu(self) -> bool:
        return any(model.target != "cpu" for model in self.models)


def check(deployment: Deployment) -> Deployment:
    """`deployment` as it is. Raises SpecError for options that are wrong, or contradict one another."""
    _check_names(deployment)
    releases = sorted({model.release for model in deployment.models})
    if len(releases) > 1:
        raise SpecError(
            f"{deployment.repository} has models for Triton {' and '.join(releases)}, and a server is of one release: "
            "deploy those of each by themselves (--model NAME), or build them again"
        )
    _check_scaling(deployment)
    unknown = set(deployment.probed) - {model.name for model in deployment.models}
    if unknown:
        names = ", ".join(model.name for model in deployment.models)
        raise SpecError(f"--probe {min(unknown)}: it is not deployed; there are {names}")
    _check_store(deployment)
    if deployment.trusted is not None and not deployment.stored:
        raise SpecError(
            f"--verify-key is for what replicas pull; the models of {deployment.repository} go into the image: verify "
            f"them before it is built (build-repo verify {deployment.repository} --key FILE)"
        )
    if deployment.pooled and deployment.secrets.keys:
        raise SpecError("--inference-pool and --keys-secret: an endpoint picker asks for metrics without a key")
    return deployment


def _check_names(deployment: Deployment) -> None:
    secrets, dashes = deployment.secrets, "lower-case letters, digits and dashes"
    for option, name, pattern, expected in (
        ("--name", deployment.name, NAME, f"at most 40 {dashes}, a letter first"),
        ("--namespace", deployment.namespace, NAMESPACE, f"at most 63 {dashes}"),
        ("--keys-secret", secrets.keys, SECRET, dashes),
        ("--store-secret", secrets.store, SECRET, dashes),
    ):
        if name is not None and not pattern.fullmatch(name):
            raise SpecError(f"{option} {name} is not a name that Kubernetes takes: expected {expected}")
    if deployment.registry is not None and not REGISTRY.fullmatch(deployment.registry):
        raise SpecError(
            f"--registry {deployment.registry} is not where images are: expected HOST, HOST:PORT or HOST/PATH, "
            "without https:// and the path in lower-case letters"
        )


def _check_store(deployment: Deployment) -> None:
    for option, value in (("--store-secret", deployment.secrets.store), ("--endpoint", deployment.endpoint)):
        if value is not None and not deployment.stored:
            raise SpecError(f"{option} is for what replicas pull; the models of {deployment.repository} are a folder's")
    endpoint = deployment.endpoint
    if endpoint is None:
        return
    if not is_address(endpoint):
        raise SpecError(f"--endpoint {endpoint} is not the address of a server: http://HOST:PORT or https://HOST")
    if not deployment.repository.startswith("s3:"):
        raise SpecError(f"--endpoint is of stores that speak S3, which {deployment.repository} is not: leave it out")


def _check_scaling(deployment: Deployment) -> None:
    scaling = deployment.scaling
    if scaling is None:
        return
    if scaling.most <= deployment.replicas:
        raise SpecError(
            f"--max-replicas {scaling.most} is not above --replicas {deployment.replicas}, which is the least: raise "
            "one or lower the other"
        )
    if not is_address(scaling.prometheus):
        raise SpecError(f"--prometheus {scaling.prometheus} is not the address of a server: http://HOST:PORT")

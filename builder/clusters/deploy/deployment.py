"""Deployment: the models and options that every target gets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelConfig

from builder.clusters.deploy.cards import refuse_crowded_cards
from builder.common.addresses import is_address, is_registry
from builder.common.cards import CARDS, GpuModel
from builder.common.errors import SpecError
from builder.options import PodOptions
from builder.repository.report.record import BuildReport
from builder.serving.plan.lines import ModelPlan

# Names that Kubernetes accepts: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # short enough for the names derived from it
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
# A host and a path, as in the names of images: https://pkg.go.dev/github.com/distribution/reference
REGISTRY = re.compile(r"[A-Za-z0-9][-.A-Za-z0-9]*(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*/?")


PLAIN = "py3"  # the end of the tag of Triton's usual image


@dataclass(frozen=True)
class DeployedModel:
    """Model of the repository.

    `plan`: the resources that it takes; `generates`: it has a decode loop, with a queue of its own; `request`: the JSON
    of a small one, for Triton's generate endpoint; `digest`: of its files and configurations, or of those that a shared
    front answers for.
    """

    name: str
    version: int
    entries: tuple[str, ...]  # its folders: the front and, if it is a model of its own, the engine
    release: str  # Triton release that it was built for
    target: str  # cpu, cuda or tensorrt
    generates: bool
    request: str
    plan: ModelPlan
    digest: str
    card: str | None = None  # that it was built for: --gpu
    container: str = PLAIN  # the end of the tag of NVIDIA's image that has its engine
    downloads: bool = False  # its engine downloads the checkpoint when it starts
    gpu_share: float = 0.0  # of the memory of each of its cards, if its engine takes a fixed share
    estimate: int = 0  # bytes that a gateway counts for it before it loads it on demand


def digest_of_model(reports: Iterable[BuildReport], configs: Sequence[ModelConfig]) -> str:
    """Return one hash of all served files and of `configs` without their version_policy.

    Another version, another build of the same number, and another number of instances have another hash.
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
class ReplicaSize:
    """Resources of one replica.

    `memory`: resident bytes of Triton; `shm`, `response_cache`: bytes; `gpus`: cards; `burst`: bytes beyond `memory`
    that it may take for seconds, which its limit allows and its request does not reserve.
    """

    cores: int
    memory: int
    shm: int
    response_cache: int
    gpus: int = 0
    burst: int = 0


@dataclass(frozen=True)
class Scaling:
    """Scale up to `max_replicas` by the milliseconds that requests wait, from the Prometheus at `prometheus`."""

    max_replicas: int
    prometheus: str
    queue_ms: int


@dataclass(frozen=True)
class LoadingOnDemand:
    """Tritons behind gateways that load models into `memory` bytes of each; `pins`: models that are always loaded."""

    memory: int
    pins: tuple[str, ...] = ()


@dataclass(frozen=True)
class PulledBytes:
    """Bytes that a pod pulls from the store: `whole` versions, or what is `described` of them."""

    whole: int
    described: int


@dataclass(frozen=True)
class SecretNames:
    """Names of the cluster's own secrets.

    `keys`: of the gateway's clients; `store`: environment for the pull, or login of a registry; `hub`: environment for
    the server, which downloads checkpoints.
    """

    keys: str | None = None
    store: str | None = None
    hub: str | None = None


@dataclass(frozen=True)
class Deployment:
    """Deployment of models.

    `repository`: a folder, or the address of an object store or of a model in a registry; `registry`: of the images,
    None if it was not given; `endpoint`: of the object store, if it is not the scheme's own; `trusted`: the public key,
    or the certificates, that pulled models must be signed with (PEM); `probed`: models whose replicas are probed;
    `monitored`: Prometheus' operator is there; `pooled`: an inference gateway chooses the replica; `pod`: requirements
    of the cluster for each pod; `pulled`: from the store, None if unknown; `on_demand`: models are loaded when they are
    asked for, by gateways in pods of their own.
    """

    name: str
    repository: str
    stored: bool  # True if it is in an object store or a registry
    models: tuple[DeployedModel, ...]
    size: ReplicaSize
    replicas: int = 2
    namespace: str = "default"
    registry: str | None = None
    endpoint: str | None = None
    trusted: str | None = None
    scaling: Scaling | None = None
    secrets: SecretNames = SecretNames()
    probed: tuple[str, ...] = ()
    monitored: bool = False
    pooled: bool = False
    pod: PodOptions = field(default_factory=PodOptions)
    pulled: PulledBytes | None = None
    on_demand: LoadingOnDemand | None = None

    @property
    def release(self) -> str:
        """Triton release of all its models."""
        return self.models[0].release

    @property
    def on_gpu(self) -> bool:
        return any(model.target != "cpu" for model in self.models)

    @property
    def container(self) -> str:
        """End of the tag of NVIDIA's image that has the engine of its models."""
        return self.models[0].container

    @property
    def runs_checkpoints(self) -> bool:
        """True if its engine runs checkpoints as they are, so that nothing that was emitted runs."""
        return self.container != PLAIN

    @property
    def login(self) -> str | None:
        """Return the secret with the login of the registry that models are pulled from; None without one."""
        return self.secrets.store if is_registry(self.repository) else None

    @property
    def downloads(self) -> bool:
        return any(model.downloads for model in self.models)

    @property
    def card(self) -> GpuModel | None:
        """Return the card its models were built for, of several the one with most memory; None if none was named."""
        cards = [CARDS[model.card] for model in self.models if model.card is not None]
        return max(cards, key=lambda card: card.memory_mb, default=None)


def check_deployment(deployment: Deployment) -> Deployment:
    """Return `deployment` unchanged. Raises SpecError for options that are wrong, or contradict one another."""
    _check_names(deployment)
    releases = sorted({model.release for model in deployment.models})
    if len(releases) > 1:
        raise SpecError(
            f"{deployment.repository} has models for Triton {' and '.join(releases)}, and a server is of one release: "
            "deploy those of each by themselves (--model NAME), or build them again"
        )
    _check_engines(deployment)
    refuse_crowded_cards(deployment)
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
    _check_on_demand(deployment)
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
        ("--hub-secret", secrets.hub, SECRET, dashes),
    ):
        if name is not None and not pattern.fullmatch(name):
            raise SpecError(f"{option} {name} is not a name that Kubernetes takes: expected {expected}")
    if deployment.registry is not None and not REGISTRY.fullmatch(deployment.registry):
        raise SpecError(
            f"--registry {deployment.registry} is not where images are: expected HOST, HOST:PORT or HOST/PATH, "
            "without https:// and the path in lower-case letters"
        )


def _check_engines(deployment: Deployment) -> None:
    if len({model.container for model in deployment.models}) > 1:
        whole = ", ".join(model.name for model in deployment.models if model.container != PLAIN)
        raise SpecError(
            f"{deployment.repository}: {whole} needs another image of Triton than the other models: deploy it by "
            "itself (--model NAME), and the others in a deployment of their own"
        )
    if deployment.secrets.hub is not None and not deployment.downloads:
        raise SpecError("--hub-secret is for servers that download checkpoints, which none of these models does")
    if deployment.scaling is not None and deployment.runs_checkpoints:
        raise SpecError(
            "--max-replicas: the time that requests wait in an engine of whole checkpoints is not known to Triton or "
            "the gateway: leave it out"
        )
    cards = sorted({model.card for model in deployment.models if model.card is not None})
    if len({CARDS[card].compute_capability for card in cards}) > 1:
        raise SpecError(
            f"{deployment.repository} has models built for {' and '.join(cards)}, which one node does not have: deploy "
            "those of each by themselves (--model NAME), or build them again for one card (--gpu)"
        )


def _check_on_demand(deployment: Deployment) -> None:
    """Raise SpecError for what loading on demand does not have."""
    if deployment.on_demand is None:
        if deployment.pod.models_claim is not None:
            raise SpecError(
                f"pod.models_claim {deployment.pod.models_claim} is for --load-on-demand: other Tritons load every "
                "model of their folder, also those that were pulled there before; leave one out, or add the other"
            )
        return
    if not deployment.stored:
        raise SpecError(
            f"--load-on-demand is for pods that pull, and the models of {deployment.repository} go into the image: "
            "push them to an object store (build-repo push), and name that with --repository"
        )
    for option, is_given, reason in (
        ("--probe", deployment.probed, "a model that is not loaded answers no probe"),
        (
            "--max-replicas",
            deployment.scaling,
            "requests also wait for models to be loaded, which replicas do not help",
        ),
        ("--inference-pool", deployment.pooled, "the gateways choose the Triton themselves"),
    ):
        if is_given:
            raise SpecError(f"{option} and --load-on-demand do not go together: {reason}; leave one of them out")


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
    if scaling.max_replicas <= deployment.replicas:
        raise SpecError(
            f"--max-replicas {scaling.max_replicas} is not above --replicas {deployment.replicas}, which is the "
            "least: raise one or lower the other"
        )
    if not is_address(scaling.prometheus):
        raise SpecError(f"--prometheus {scaling.prometheus} is not the address of a server: http://HOST:PORT")

"""Define what a cluster requires of each pod: the section `pod:` of a models.yaml, which `build-repo deploy` reads.

Fields: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from builder.common.images import is_reference
from builder.options.sections import Options

# Names and labels that Kubernetes accepts: https://kubernetes.io/docs/concepts/overview/working-with-objects/
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")]
LabelKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?$"
    ),
]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?$")]


def _reference(text: str) -> str:
    if not is_reference(text):
        raise ValueError("expected the name of an image: HOST/PATH:TAG or HOST/PATH@sha256:DIGEST")
    return text


ImageReference = Annotated[str, AfterValidator(_reference)]


class Toleration(Options):
    """A taint that pods tolerate."""

    key: LabelKey | None = None
    """Key of the taint. Default: any, with the operator Exists."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal: the taint has this value. Exists: it has any."""
    value: LabelValue | None = None
    """Value of the taint, with the operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: all of them."""
    toleration_seconds: int | None = Field(None, ge=0)
    """Seconds that a pod stays on a node with the taint, with the effect NoExecute. Default: for ever."""

    @model_validator(mode="after")
    def _go_together(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("the operator Exists has no `value`: remove it, or use Equal")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("the operator Equal needs a `key`; Exists without one tolerates every taint")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("`toleration_seconds` needs the effect NoExecute")
        return self


class PodImages(Options):
    """Images of the containers, where they are not those that `deploy` names; by tag or by digest."""

    triton: ImageReference | None = None
    """Image of Triton, built from the written Containerfile. Default: REGISTRY/NAME-triton."""
    gateway: ImageReference | None = None
    """Image of the gateway. Default: REGISTRY/build-repo-gateway."""
    pull: ImageReference | None = None
    """Image of the pull. Default: REGISTRY/build-repo-pull."""
    ray: ImageReference | None = None
    """Image of a node of KubeRay. Default: REGISTRY/build-repo-ray."""
    base: ImageReference | None = None
    """Image that the written Containerfile starts from. Default: NVIDIA's container of the
    release; for Ray python:3.11-slim-bookworm."""


class PodOptions(Options):
    """Requirements of a cluster for every pod. Set in models.yaml under `pod:`, beside `models:`."""

    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets with the credentials of registries."""
    node_selector: Mapping[LabelKey, LabelValue] = {}
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that pods tolerate."""
    priority_class: ObjectName | None = None
    """PriorityClass of the pods."""
    service_account: ObjectName | None = None
    """Service account of the pods, for example one that a cloud gives access to the object store."""
    runtime_class: ObjectName | None = None
    """RuntimeClass that runs the containers."""
    gpu_labels: bool = True
    """Choose nodes whose card is that of `--gpu`, or has as much memory and the same compute
    capability, by the labels of NVIDIA's GPU Feature Discovery. False where nodes have no such
    labels: then `node_selector` chooses the card."""
    cache_claim: ObjectName | None = None
    """PersistentVolumeClaim that keeps what servers on a GPU compile (engines of ONNX Runtime's
    TensorRT, kernels of vLLM) and download (checkpoints for vLLM). Default: an empty volume, so
    that each new pod does it again."""
    models_claim: ObjectName | None = None
    """PersistentVolumeClaim with one copy of the models for all Tritons of `--load-on-demand`,
    ReadWriteMany if they run on several machines; of one deployment. Default: each pod pulls a
    copy of its own."""
    images: PodImages = PodImages()
    """Images of the containers."""

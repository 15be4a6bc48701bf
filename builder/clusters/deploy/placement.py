"""Fields of a pod's spec that say where it may run and as whom: the section `pod` of a models.yaml, and what GPUs need.

Labels: github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md (integers; memory in MiB).
"""

from __future__ import annotations

from typing import Any

from builder.clusters.deploy.deployment import Deployment
from builder.common.cards import GpuModel
from builder.options import Toleration

LABELS = "nvidia.com/gpu"  # of NVIDIA's GPU Feature Discovery; its device plugin names the resource and the taint so
# of a card's memory by its data sheet, what a driver leaves at least: of an A100's 40,960 MiB, 39,538 in that README
VISIBLE = 7 / 8


def placement(deployment: Deployment) -> dict[str, Any]:
    """Return the fields that the options of pods set, and those of pods on GPUs; empty by default."""
    options = deployment.pod
    gpu = Toleration(key=LABELS, operator="Exists", effect="NoSchedule")
    own = (gpu,) if deployment.on_gpu and gpu not in options.tolerations else ()
    card = deployment.card if options.gpu_labels else None
    fields = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "affinity": {} if card is None else _affinity(card),
        "tolerations": [_toleration(toleration) for toleration in (*options.tolerations, *own)],
        "priorityClassName": options.priority_class,
        "serviceAccountName": options.service_account,
        "runtimeClassName": options.runtime_class,
    }
    return {name: value for name, value in fields.items() if value}


def _affinity(card: GpuModel) -> dict[str, Any]:
    """Return the requirement of a node whose card has the compute capability of `card` and at least its memory."""
    major, minor = card.compute_capability.split(".")
    requirements = (
        ("compute.major", "In", major),
        ("compute.minor", "In", minor),
        ("memory", "Gt", str(int(card.memory_mb * VISIBLE))),
    )
    expressions = [
        {"key": f"{LABELS}.{label}", "operator": operator, "values": [value]} for label, operator, value in requirements
    ]
    required = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _toleration(toleration: Toleration) -> dict[str, Any]:
    fields = toleration.model_dump(exclude_none=True)
    if "toleration_seconds" in fields:
        fields["tolerationSeconds"] = fields.pop("toleration_seconds")
    return fields

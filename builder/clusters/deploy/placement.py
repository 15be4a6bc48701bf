"""Fields of a pod's spec that say where it may run and as whom: the section `pod` of a models.yaml."""

from __future__ import annotations

from typing import Any

from builder.options import PodOptions, Toleration


def placement(options: PodOptions) -> dict[str, Any]:
    """Return the fields that `options` set; empty by default."""
    fields = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "tolerations": [_toleration(toleration) for toleration in options.tolerations],
        "priorityClassName": options.priority_class,
        "serviceAccountName": options.service_account,
        "runtimeClassName": options.runtime_class,
    }
    return {name: value for name, value in fields.items() if value}


def _toleration(toleration: Toleration) -> dict[str, Any]:
    fields = toleration.model_dump(exclude_none=True)
    if "toleration_seconds" in fields:
        fields["tolerationSeconds"] = fields.pop("toleration_seconds")
    return fields

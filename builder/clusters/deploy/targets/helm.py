"""Helm chart: the manifests of the target kubernetes, with values for what differs between clusters.

Its templates only insert values, so a chart with its default values equals the manifests, whatever the release is
called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.image import image_files
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.pod import MIN_KUBERNETES, image_steps
from builder.clusters.deploy.targets import HEADER, Target, to_yaml
from builder.common.distribution import own_version

# By its key in values.yaml, a path in the spec of pods; an element of a list is found by its name.
VALUES_OF_PODS = {
    "pullImage": "initContainers.pull.image",
    "tritonImage": "initContainers.triton.image",
    "gatewayImage": "containers.gateway.image",
    "tritonResources": "initContainers.triton.resources",
    "gatewayResources": "containers.gateway.resources",
    "sharedMemory": "volumes.shm.emptyDir.sizeLimit",
    "imagePullSecrets": "imagePullSecrets",
    "nodeSelector": "nodeSelector",
    "affinity": "affinity",
    "tolerations": "tolerations",
    "priorityClassName": "priorityClassName",
    "serviceAccountName": "serviceAccountName",
    "runtimeClassName": "runtimeClassName",
    "cacheVolume": "volumes.cache.persistentVolumeClaim",
}
# By its key, the object and the path in it.
VALUES = {
    "replicas": ("deployment", "spec.replicas"),
    "minReplicas": ("scaled-object", "spec.minReplicaCount"),
    "maxReplicas": ("scaled-object", "spec.maxReplicaCount"),
}
# With models on demand, whose Tritons are the only container of their pods.
VALUES_ON_DEMAND = {"replicas": ("tritons", "spec.replicas"), "gatewayReplicas": ("deployment", "spec.replicas")}
RELEASE, NAMESPACE = "the-release-name", "the-release-namespace"  # placeholders in templates until they are text


def _files(deployment: Deployment) -> dict[str, str]:
    plain = objects(deployment)
    templates = objects(replace(deployment, name=RELEASE, namespace=NAMESPACE))
    values = {}
    for key, name, path in _locations(deployment):
        if name in plain and (location := _find(plain[name], path)) is not None:
            parent, last = location
            values[key] = parent[last]
            template, at = _find(templates[name], path) or location
            template[at] = f"the-value-{key}"
    chart = {
        "apiVersion": "v2",
        "name": deployment.name,
        "description": "Triton and the gateway of build-repo, on models that were built and verified",
        "type": "application",
        "version": own_version(),
        "appVersion": deployment.release,
        "kubeVersion": f">={MIN_KUBERNETES}.0-0",
    }
    return {
        "Chart.yaml": to_yaml(chart),
        "values.yaml": to_yaml(values),
        "values.schema.json": json.dumps(_schema(values), indent=1) + "\n",
        **{f"templates/{name}.yaml": _template(document, values) for name, document in templates.items()},
        **image_files(deployment),
        ".helmignore": f"{HEADER}image/\n",
    }


def _locations(deployment: Deployment) -> Iterator[tuple[str, str, str]]:
    """Yield each key of values.yaml with an object that may have its value, and the path in it."""
    is_on_demand = deployment.on_demand is not None
    for key, (name, path) in (VALUES_ON_DEMAND if is_on_demand else VALUES).items():
        yield key, name, path
    for key, path in VALUES_OF_PODS.items():
        yield key, "deployment", f"spec.template.spec.{path}"
        if is_on_demand:
            alone = path.replace("initContainers.triton", "containers.triton")
            yield key, "tritons", f"spec.template.spec.{alone}"


def _template(document: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return `document` with the expressions of a chart instead of the placeholders."""
    written = to_yaml(document)
    if "{{" in written:
        raise AssertionError("a manifest contains text that Helm would take for a template expression")
    for key in values:
        written = written.replace(f"the-value-{key}\n", f"{{{{ .Values.{key} | toJson }}}}\n")
    for stands, name in ((NAMESPACE, "Namespace"), (RELEASE, "Name")):
        written = written.replace(f": {stands}\n", f": {{{{ .Release.{name} | quote }}}}\n")
        written = written.replace(stands, f"{{{{ .Release.{name} }}}}")
    return written


def _find(document: Any, path: str) -> tuple[Any, str] | None:
    """Return the container of the last part of `path`, and that part; None if the document has no such path."""
    *parts, last = path.split(".")
    for part in parts:
        if isinstance(document, list):
            document = next((entry for entry in document if entry["name"] == part), None)
        else:
            document = document.get(part)
        if document is None:
            return None
    return (document, last) if last in document else None


def _schema(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of values.yaml: the same keys, with values of the same kind."""
    kinds = {
        int: {"type": ["integer", "string"]},
        str: {"type": "string"},
        list: {"type": "array"},
        dict: {"type": "object"},
    }
    return {
        "$schema": "https://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {key: kinds[type(value)] for key, value in values.items()},
        "additionalProperties": False,
    }


TARGET = Target(
    _files,
    steps=lambda deployment, output: [
        *image_steps(deployment, output),
        f"helm upgrade --install {deployment.name} {output} --namespace {deployment.namespace}",
    ],
)

"""Plain manifests, for `kubectl apply -k`."""

from __future__ import annotations

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.image import image_files
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.pod import image_steps
from builder.clusters.deploy.targets import Target, to_yaml


def _files(deployment: Deployment) -> dict[str, str]:
    manifests = {f"{name}.yaml": document for name, document in objects(deployment).items()}
    index = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": deployment.namespace,
        "resources": list(manifests),
    }
    written = {name: to_yaml(document) for name, document in {"kustomization.yaml": index, **manifests}.items()}
    return {**written, **image_files(deployment)}


TARGET = Target(
    _files, steps=lambda deployment, output: [*image_steps(deployment, output), f"kubectl apply -k {output}"]
)

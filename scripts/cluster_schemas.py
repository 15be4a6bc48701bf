"""Write tests/clusters/deploy/definitions anew, from the operators' own definitions.

    python -m scripts.cluster_schemas FOLDER

FOLDER has a clone of each repository, as NAME or NAME.git or OWNER+NAME/repo. Descriptions are left out, and of an
InferenceService everything but a predictor that a ServingRuntime of ours serves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEFINITIONS = Path(__file__).parent.parent / "tests" / "clusters" / "deploy" / "definitions"


@dataclass(frozen=True)
class Source:
    """Place of a definition: `path` at `tag` of a repository of github.com.

    `keys`: keep only these keys of a part of it; `opaque`: fields, at any depth, whose contents are not kept.
    """

    repository: str
    tag: str
    path: str
    version: str
    part: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()


PREDICTOR = (
    "affinity annotations autoScaling automountServiceAccountToken deploymentStrategy enableServiceLinks "
    "imagePullSecrets initContainers labels maxReplicas minReplicas model nodeSelector priorityClassName "
    "runtimeClassName securityContext serviceAccountName terminationGracePeriodSeconds tolerations "
    "topologySpreadConstraints volumes"
)
OF_KUBERNETES = ("template", "headService", "autoscalerOptions")
UNSAID = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
SOURCES = {
    "PodMonitor": Source(
        "prometheus-operator/prometheus-operator",
        "v0.93.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "v1",
    ),
    "PrometheusRule": Source(
        "prometheus-operator/prometheus-operator",
        "v0.93.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        "v1",
    ),
    "ScaledObject": Source("kedacore/keda", "v2.20.2", "config/crd/bases/keda.sh_scaledobjects.yaml", "v1alpha1"),
    "InferencePool": Source(
        "kubernetes-sigs/gateway-api-inference-extension",
        "v1.6.0",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
        "v1",
    ),
    "InferenceService": Source(
        "kserve/kserve",
        "v0.20.0",
        "config/crd/full/serving.kserve.io_inferenceservices.yaml",
        "v1beta1",
        ("properties", "spec", "properties", "predictor"),
        tuple(PREDICTOR.split()),
    ),
    "RayService": Source(
        "ray-project/kuberay",
        "v1.7.0",
        "ray-operator/config/crd/bases/ray.io_rayservices.yaml",
        "v1",
        ("properties", "spec"),
        ("serveConfigV2", "rayClusterConfig", "serviceUnhealthySecondThreshold", "upgradeStrategy"),
        opaque=OF_KUBERNETES,
    ),
    "RayJob": Source(
        "ray-project/kuberay",
        "v1.7.0",
        "ray-operator/config/crd/bases/ray.io_rayjobs.yaml",
        "v1",
        ("properties", "spec"),
        ("entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec", "submissionMode"),
        opaque=OF_KUBERNETES,
    ),
    "ServingRuntime": Source(
        "kserve/kserve", "v0.20.0", "config/crd/full/serving.kserve.io_servingruntimes.yaml", "v1alpha1"
    ),
}


def schema(definition: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return the schema of a version of a custom resource, without descriptions and parts that are not kept."""
    (version,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == source.version]
    whole = _bare(version["schema"]["openAPIV3Schema"], source.opaque)
    if source.part:
        part = whole
        for key in source.part:
            part = part[key]
        part["properties"] = {key: part["properties"][key] for key in source.keys}
        if source.part[-1] != "spec":
            whole["properties"]["spec"]["properties"] = {source.part[-1]: part}
        del whole["properties"]["status"]
    group = definition["spec"]["group"]
    return {"apiVersion": f"{group}/{source.version}", "source": _address(source), "schema": whole}


def _address(source: Source) -> str:
    return f"https://github.com/{source.repository}/blob/{source.tag}/{source.path}"


def _bare(node: Any, opaque: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_bare(entry, opaque) for entry in node]
    if not isinstance(node, dict):
        return node
    described = {key: value for key, value in node.items() if not (key == "description" and isinstance(value, str))}
    return {key: UNSAID if key in opaque else _bare(value, opaque) for key, value in described.items()}


def _clone(folder: Path, repository: str) -> Path:
    owner, name = repository.split("/")
    places = [folder / name, folder / f"{name}.git", folder / f"{owner}+{name}" / "repo"]
    return next(folder for folder in places if folder.exists())


def main(folder: Path) -> None:
    DEFINITIONS.mkdir(exist_ok=True)
    for kind, source in SOURCES.items():
        command = ["git", "-C", str(_clone(folder, source.repository)), "show", f"{source.tag}:{source.path}"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        written = json.dumps(schema(yaml.load(text, yaml.CSafeLoader), source), separators=(",", ":"))
        (DEFINITIONS / f"{kind}.json").write_text(written + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

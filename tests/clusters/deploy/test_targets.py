"""Every deployment target: its registration, its files, and their validity for the orchestrator."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.pod import MIN_KUBERNETES
from builder.clusters.deploy.scaling import wait_queries
from builder.clusters.deploy.targets import Target, find_target, names
from builder.common.errors import SpecError
from builder.serving.gateway.metrics import Metrics
from tests.clusters.deploy.deployments import (
    ALL,
    ALL_FOR_KSERVE,
    DEPLOYMENTS,
    FOR_KSERVE,
    ON_DEMAND,
    STORED,
    WITH_GPU,
)
from tests.clusters.deploy.schemas import CUSTOM, refuse_invalid

VERSIONS = (MIN_KUBERNETES, "1.33", "1.37")


def documents(deployment: Deployment, target: str = "kubernetes") -> dict[str, Any]:
    """Return the files that a target writes, parsed."""
    written = find_target(target).files(deployment)
    return {name: yaml.safe_load(text) for name, text in written.items() if name.endswith(".yaml")}


def test_targets_are_registered_by_their_folder() -> None:
    assert {"helm", "kserve", "kubernetes"} <= set(names())
    for name in names():
        assert isinstance(find_target(name), Target)


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_kubernetes_objects(version: str, deployment: Deployment) -> None:
    written = documents(deployment)
    index = written.pop("kustomization.yaml")
    assert index["resources"] == list(written)
    for document in written.values():
        refuse_invalid(document, version)


@pytest.mark.parametrize("deployment", FOR_KSERVE.values(), ids=FOR_KSERVE)
def test_kserve_manifests_are_valid_for_its_definitions(deployment: Deployment) -> None:
    for document in documents(deployment, "kserve").values():
        refuse_invalid(document, VERSIONS[-1])


def test_schemas_refuse_unknown_fields() -> None:
    service = documents(STORED)["service.yaml"]
    service["spec"]["portz"] = service["spec"].pop("ports")
    with pytest.raises(ValidationError, match="portz"):
        refuse_invalid(service, VERSIONS[-1])
    kinds = [*documents(ALL).values(), *documents(WITH_GPU).values(), *documents(STORED, "kserve").values()]
    custom = {document["kind"]: document for document in kinds if document["kind"] in CUSTOM}
    assert set(custom) == set(CUSTOM) - {"RayService", "RayJob"}, "which test_ray.py has"
    for document in custom.values():
        document["spec"]["sellector"] = {}
        with pytest.raises(AssertionError, match="sellector"):
            refuse_invalid(document, VERSIONS[-1])


def test_kserve_routes_requests_and_scales_on_triton_directly() -> None:
    runtime, service = (
        documents(ALL_FOR_KSERVE, "kserve")[f"{n}.yaml"] for n in ("serving-runtime", "inference-service")
    )
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container", "the name by which KServe finds it"
    assert container["ports"][0]["containerPort"] == 8000, "KServe sends HTTP to the first port"
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["model"]["modelFormat"]["name"] in {f["name"] for f in runtime["spec"]["supportedModelFormats"]}
    assert [pull["name"] for pull in predictor["initContainers"]] == ["pull"]
    metric, *_ = predictor["autoScaling"]["metrics"]
    replicas = 'namespace="text", pod=~"search-predictor-[a-z0-9]+(-[a-z0-9]+)?"'
    assert metric["external"]["metric"]["query"].endswith(
        f"* scalar(count(count by (pod) (nv_inference_request_success{{{replicas}}})))"
    )
    with pytest.raises(SpecError, match="which the target kserve does not have"):
        documents(ALL, "kserve")  # it has keys


def test_kserve_pods_name_their_metrics_port_to_prometheus() -> None:
    """By default, KServe names the port of its queue-proxy, which only pods in Knative mode have."""
    written = documents(replace(ALL_FOR_KSERVE, monitored=True), "kserve")
    runtime, predictor = (
        written["serving-runtime.yaml"]["spec"],
        written["inference-service.yaml"]["spec"]["predictor"],
    )
    ports = {port["name"]: port["containerPort"] for port in runtime["containers"][0]["ports"]}
    assert predictor["annotations"] == {
        "serving.kserve.io/enable-prometheus-scraping": "false",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(ports["metrics"]),
        "prometheus.io/path": "/metrics",
    }
    monitor = written["pod-monitor.yaml"]
    refuse_invalid(monitor, VERSIONS[-1])
    assert monitor["spec"]["selector"]["matchLabels"] == predictor["labels"]
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "metrics", "path": "/metrics"}]
    refuse_invalid(written["alerts.yaml"], VERSIONS[-1])
    assert "nv_inference_request_failure" in yaml.safe_dump(written["alerts.yaml"]), "there is no gateway"


def test_alerts_name_metrics_that_the_replicas_have() -> None:
    written = documents(ALL)
    (group,) = written["alerts.yaml"]["spec"]["groups"]
    assert [rule["alert"] for rule in group["rules"]] == ["ReplicasMissing", "RequestsFail", "RequestsAreRefused"]
    metrics = Metrics()
    metrics.responses.labels("/v1/embeddings", "200").inc()
    names = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    for rule in group["rules"]:
        (name,) = set(re.findall(r"(\w+)\{job=\"text/search\"", rule["expr"]))
        assert name in names or name == "up"


@pytest.mark.parametrize(
    ("pod", "of_it"),
    [
        ("search-6b7c8d9f5-x2x4q", True),
        ("search-6b7c8d9f5x2x4q", True),  # Kubernetes truncates long names
        ("search-gpu-6b7c8d9f5-x2x4q", False),
        ("research-6b7c8d9f5-x2x4q", False),
    ],
)
def test_scaling_query_selects_only_pods_of_its_deployment(pod: str, of_it: bool) -> None:
    for query in wait_queries(ALL, ALL.name).values():
        for pattern in re.findall(r'pod=~"([^"]*)"', query):
            assert bool(re.fullmatch(pattern, pod)) == of_it


class Renderer:
    """Minimal renderer of the Go templates in these charts, for machines without Helm.

    It knows values, the release's name, and the filters `toJson` and `quote`; it refuses anything else in braces.
    """

    EXPRESSION = re.compile(r"\{\{ \.(Values|Release)\.(\w+)(?: \| (toJson|quote))? \}\}")

    def __init__(self, values: dict[str, Any], name: str, namespace: str) -> None:
        self.known = {"Values": values, "Release": {"Name": name, "Namespace": namespace}}

    def render(self, template: str) -> str:
        text = self.EXPRESSION.sub(self._value, template)
        assert "{{" not in text, text
        return text

    def _value(self, match: re.Match[str]) -> str:
        value = self.known[match[1]][match[2]]
        return json.dumps(value) if match[3] else str(value)


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_chart_with_default_values_renders_the_manifests(deployment: Deployment) -> None:
    chart = find_target("helm").files(deployment)
    renderer = Renderer(yaml.safe_load(chart["values.yaml"]), deployment.name, deployment.namespace)
    rendered = {
        Path(name).stem: yaml.safe_load(renderer.render(text))
        for name, text in chart.items()
        if name.startswith("templates/")
    }
    assert rendered == objects(deployment)


def test_chart_renders_other_values_and_another_name() -> None:
    chart = find_target("helm").files(ALL)
    values = yaml.safe_load(chart["values.yaml"])
    assert set(json.loads(chart["values.schema.json"])["properties"]) == set(values)
    renderer = Renderer({**values, "maxReplicas": 20, "sharedMemory": "1Gi"}, "other", "elsewhere")
    scaled = yaml.safe_load(renderer.render(chart["templates/scaled-object.yaml"]))
    assert scaled["spec"]["maxReplicaCount"] == 20
    assert scaled["spec"]["scaleTargetRef"]["name"] == "other"
    assert (
        'namespace="elsewhere", pod=~"other-[a-z0-9]+(-[a-z0-9]+)?"'
        in scaled["spec"]["triggers"][0]["metadata"]["query"]
    )
    pod = yaml.safe_load(renderer.render(chart["templates/deployment.yaml"]))["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]


def test_chart_values_reach_the_pods_of_tritons_and_gateways_on_demand() -> None:
    chart = find_target("helm").files(ON_DEMAND)
    values = yaml.safe_load(chart["values.yaml"])
    assert (values["replicas"], values["gatewayReplicas"]) == (3, 2)
    renderer = Renderer({**values, "replicas": 7, "pullImage": "pull:2", "tritonImage": "triton:2"}, "other", "text")
    tritons, gateways = (
        yaml.safe_load(renderer.render(chart[f"templates/{n}.yaml"])) for n in ("tritons", "deployment")
    )
    assert (tritons["metadata"]["name"], tritons["spec"]["replicas"], gateways["spec"]["replicas"]) == (
        "other-tritons",
        7,
        2,
    )
    specs = [workload["spec"]["template"]["spec"] for workload in (tritons, gateways)]
    assert [spec["initContainers"][0]["image"] for spec in specs] == ["pull:2", "pull:2"]
    (triton,), (gateway,) = (spec["containers"] for spec in specs)
    assert triton["image"] == "triton:2"
    assert "--url=dns:///other-tritons:8001" in gateway["args"]

"""A replica's permissions, resources, probes and shutdown, checked against the code that uses them."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from builder.cli import parse
from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.on_demand import gateway_pod, triton_pod
from builder.clusters.deploy.pod import GATEWAY_PORT, LOAD_BYTES_PER_S, PULL_TIMEOUT_S, pod
from builder.clusters.deploy.probes import REQUEST_TIMEOUT_S
from builder.clusters.deploy.targets import find_target
from builder.repository.config.arguments import LIVENESS_FOLDER
from builder.repository.liveness import METHOD
from builder.serving.gateway.app import APIS
from builder.serving.gateway.auth import PUBLIC_ROUTES
from builder.serving.gateway.settings import GatewaySettings
from tests.clusters.deploy.deployments import (
    ALL,
    ALL_FOR_KSERVE,
    DEPLOYMENTS,
    IN_IMAGE,
    ON_DEMAND,
    SIZE,
    STORED,
    WITH_GPU,
)
from tests.clusters.deploy.restricted import violations
from tests.clusters.deploy.test_targets import documents


def _kserve(deployment: Deployment) -> dict[str, Any]:
    """Return the pod that KServe derives from a runtime and a service."""
    written = documents(deployment, "kserve")
    runtime = written["serving-runtime.yaml"]["spec"]
    predictor = written["inference-service.yaml"]["spec"]["predictor"]
    return {**predictor, "containers": runtime["containers"], "volumes": runtime["volumes"]}


PODS = {
    **{name: pod(deployment) for name, deployment in DEPLOYMENTS.items() if deployment.on_demand is None},
    "Triton on demand": triton_pod(ON_DEMAND),
    "gateway on demand": gateway_pod(ON_DEMAND),
    "kserve": _kserve(ALL_FOR_KSERVE),
}


def _containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in (*spec["initContainers"], *spec["containers"])}


@pytest.mark.parametrize("spec", PODS.values(), ids=PODS)
def test_pod_meets_the_restricted_standard_with_a_read_only_root(spec: dict[str, Any]) -> None:
    assert violations(spec) == []
    assert spec["automountServiceAccountToken"] is False
    for container in _containers(spec).values():
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        named = {mount["name"] for mount in container["volumeMounts"]}
        assert named <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"privileged": True}, "triton: privileged"),
        ({"allowPrivilegeEscalation": None}, "triton: allowPrivilegeEscalation is not false"),
        ({"runAsUser": 0}, "triton: root"),
        ({"capabilities": {"drop": ["NET_RAW"]}}, "triton: capabilities are not dropped"),
        ({"seccompProfile": {"type": "Unconfined"}}, "triton: no seccomp profile"),
        ({"runAsNonRoot": False}, "triton: runAsNonRoot is not true"),
    ],
)
def test_restricted_checker_reports_each_violation(change: dict[str, Any], problem: str) -> None:
    spec = copy.deepcopy(PODS["stored"])
    _containers(spec)["triton"]["securityContext"].update(change)
    assert violations(spec) == [problem]
    spec = copy.deepcopy(PODS["stored"])
    spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    assert violations(spec) == ["the volume host is a hostPath"]


def test_triton_container_has_the_resources_of_the_plan() -> None:
    triton = _containers(pod(STORED))["triton"]
    assert triton["resources"]["requests"] == {"cpu": SIZE.cores, "memory": SIZE.memory}
    assert triton["resources"]["limits"] == {"cpu": SIZE.cores, "memory": SIZE.memory + SIZE.shm}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SIZE.shm}} in pod(STORED)["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in triton["volumeMounts"]
    assert f"--cache-config=local,size={SIZE.response_cache}" in triton["args"]
    assert triton["startupProbe"]["failureThreshold"] * triton["startupProbe"]["periodSeconds"] >= 300
    card = _containers(pod(WITH_GPU))["triton"]
    assert card["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "cache", "mountPath": "/engines"} in card["volumeMounts"]
    assert card["startupProbe"]["failureThreshold"] * card["startupProbe"]["periodSeconds"] >= 1800, "as in compose"


@pytest.mark.parametrize("spec", PODS.values(), ids=PODS)
def test_probes_use_ports_that_their_container_exposes(spec: dict[str, Any]) -> None:
    for container in _containers(spec).values():
        ports = {port["name"] for port in container.get("ports", ())}
        probes = [container[key] for key in container if key.endswith("Probe")]
        assert len(probes) == {"pull": 0, "gateway": 2}.get(container["name"], 3)
        assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports


def test_gateway_accepts_its_arguments_and_serves_its_probes() -> None:
    gateway = _containers(pod(ALL))["gateway"]
    _, options = parse(["gateway", *gateway["args"]])
    assert (options.url, options.port) == (["127.0.0.1:8001"], GATEWAY_PORT)
    paths = {gateway[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")}
    assert {("GET", path) for path in paths} <= set(PUBLIC_ROUTES), "asked without a key"
    assert paths <= {api.path for api in APIS if api.method == "GET"}
    monitor = objects(ALL)["pod-monitor"]["spec"]["podMetricsEndpoints"]
    assert {end["path"] for end in monitor} == {"/metrics"}
    assert {end["port"] for end in monitor} == {"metrics", "gateway"}


def test_pull_container_pulls_one_version_of_each_model() -> None:
    pull = _containers(pod(ALL))["pull"]
    _, options = parse(["pull", *pull["args"]])
    assert options.name == ["minilm@3", "writes@1"]
    assert options.store == "s3://bucket/models"
    (to,) = [mount["mountPath"] for mount in pull["volumeMounts"] if mount["name"] == "models"]
    assert str(options.repository) == f"{to}/models", "a folder of the volume: the pull writes beside it"
    served = [m for m in _containers(pod(ALL))["triton"]["volumeMounts"] if m["name"] == "models"]
    assert served == [{"name": "models", "mountPath": "/models", "subPath": "models", "readOnly": True}]
    assert "pull" not in _containers(pod(IN_IMAGE))


def _on_ray() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod of KubeRay's head node, and its trusted keys."""
    written = documents(replace(ALL, monitored=False, probed=()), "ray")
    head = written["rayservice.yaml"]["spec"]["rayClusterConfig"]["headGroupSpec"]
    return head["template"]["spec"], written["trusted.yaml"]


TRUSTING = {
    "kubernetes": (pod(ALL), objects(ALL)["trusted"]),
    "kserve": (PODS["kserve"], documents(ALL_FOR_KSERVE, "kserve")["trusted.yaml"]),
    "ray": _on_ray(),
}


@pytest.mark.parametrize(("spec", "written"), TRUSTING.values(), ids=TRUSTING)
def test_pull_container_mounts_the_trusted_keys(spec: dict[str, Any], written: dict[str, Any]) -> None:
    pull = _containers(spec)["pull"]
    _, options = parse(["pull", *pull["args"]])
    (mount,) = [mount for mount in pull["volumeMounts"] if mount["name"] == "trusted"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "trusted"]
    assert volume["configMap"]["name"] == written["metadata"]["name"]
    assert {f"{mount['mountPath']}/{name}": text for name, text in written["data"].items()} == {
        str(options.verify_key): ALL.trusted
    }


@pytest.mark.parametrize(("release", "path"), [("26.03", "live"), ("26.04", "ready")])
def test_liveness_probe_reports_a_dead_model_from_26_04_on(release: str, path: str) -> None:
    """Before 26.04, only a request to the model detects its failure; `--probe` sends one on any release."""
    models = tuple(replace(model, release=release) for model in STORED.models)
    triton = _containers(pod(replace(STORED, models=models)))["triton"]
    assert triton["livenessProbe"]["exec"]["command"][-1].endswith(f"/v2/health/{path}")
    probed = _containers(pod(replace(STORED, models=models, probed=("minilm",))))["triton"]
    assert "generate" in probed["livenessProbe"]["exec"]["command"][-1]
    assert f"/v2/health/{path}\n" in probed["livenessProbe"]["exec"]["command"][-1], "another model may have died"
    assert [url.partition("/v2/")[2] for url in probed["readinessProbe"]["exec"]["command"][-2:]] == [
        "health/ready",
        "models/minilm/ready",
    ]


@pytest.mark.parametrize("spec", [spec for name, spec in PODS.items() if name != "gateway on demand"])
def test_hung_server_restarts_within_30_s(spec: dict[str, Any]) -> None:
    """Regression: the probe asked only for the health, which stays 200, and the grace period took minutes."""
    triton = next(c for name, c in _containers(spec).items() if name in ("triton", "kserve-container"))
    probe = triton["livenessProbe"]
    assert METHOD in probe["exec"]["command"][-1].splitlines()[0], "an inference, before anything else"
    silent = probe["failureThreshold"] * probe["periodSeconds"] + REQUEST_TIMEOUT_S
    assert silent + probe["terminationGracePeriodSeconds"] <= 30
    assert probe["failureThreshold"] >= 2
    assert probe["timeoutSeconds"] > REQUEST_TIMEOUT_S
    assert f"--model-repository={LIVENESS_FOLDER}" in triton["args"]


def test_triton_stops_after_the_gateway_and_both_have_time_to_drain() -> None:
    """A sidecar is stopped after the containers beside it: https://kubernetes.io/docs/concepts/workloads/pods/."""
    spec = pod(STORED)
    assert _containers(spec)["triton"]["restartPolicy"] == "Always", "which makes it a sidecar"
    assert [container["name"] for container in spec["containers"]] == ["gateway"]
    leaving = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= leaving + GatewaySettings().drain_s + 30
    kserve = PODS["kserve"]
    assert (
        kserve["terminationGracePeriodSeconds"]
        >= kserve["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] + 30
    )


def test_manifests_reference_secrets_and_never_contain_them() -> None:
    for target in ("kubernetes", "helm"):
        written = "\n".join(find_target(target).files(ALL).values())
        assert "kind: Secret" not in written
    spec = pod(ALL)
    (keys,) = _containers(spec)["gateway"]["env"]
    assert keys["valueFrom"] == {"secretKeyRef": {"name": "gateway-keys", "key": "keys"}}
    assert _containers(spec)["pull"]["envFrom"] == [{"secretRef": {"name": "store-credentials"}}]
    (_, gateway) = objects(ALL)["pod-monitor"]["spec"]["podMetricsEndpoints"]
    assert gateway["authorization"]["credentials"] == {"name": "gateway-keys", "key": "metrics"}
    named = {variable["name"] for container in _containers(spec).values() for variable in container.get("env", ())}
    assert {name for name in named if re.search("KEY|SECRET|TOKEN", name)} == {"BUILD_REPO_GATEWAY_KEYS"}


def test_network_policy_limits_ingress_and_egress() -> None:
    policy = objects(ALL)["network-policy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    clients, prometheus = policy["ingress"]
    assert [port["port"] for port in clients["ports"]] == [GATEWAY_PORT]
    assert [port["port"] for port in prometheus["ports"]] == [8002, GATEWAY_PORT]
    assert [port["port"] for rule in policy["egress"] for port in rule.get("ports", ())] == [53, 53, 9000], (
        "names, and the store"
    )
    for endpoint, port in ((None, 443), ("https://s3.of.example.com", 443), ("http://10.0.0.7", 80)):
        (_, store) = objects(replace(ALL, endpoint=endpoint))["network-policy"]["spec"]["egress"]
        assert store == {"ports": [{"protocol": "TCP", "port": port}]}
    assert objects(IN_IMAGE)["network-policy"]["spec"]["egress"] == []


@pytest.mark.parametrize(
    ("endpoint", "namespace"),
    [
        ("http://rgw.rook", "rook"),
        ("http://rgw.rook.svc:80", "rook"),
        ("https://rgw.rook.svc.cluster.local", "rook"),
        ("http://minio:9000", "text"),
    ],
)
def test_network_policy_opens_all_ports_of_an_in_cluster_store(endpoint: str, namespace: str) -> None:
    """A policy sees the port of the pod, not of its service: MinIO's service maps 443 to 9000."""
    *_, store = objects(replace(ALL, endpoint=endpoint))["network-policy"]["spec"]["egress"]
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    assert store == {"to": [{"namespaceSelector": selector}]}


def test_rollout_deadline_covers_the_pull_and_the_load() -> None:
    """By default, Kubernetes reports a rollout as failed after ten minutes, and Helm rolls it back."""
    large = replace(STORED, size=replace(SIZE, memory=200 << 30))
    for deployment in (STORED, WITH_GPU, large):
        probe = _containers(pod(deployment))["triton"]["startupProbe"]
        start = probe["periodSeconds"] * probe["failureThreshold"]
        assert objects(deployment)["deployment"]["spec"]["progressDeadlineSeconds"] >= start + PULL_TIMEOUT_S
        assert start >= deployment.size.memory / LOAD_BYTES_PER_S


def test_selectors_match_the_labels_of_the_pod() -> None:
    documents_of_pod = objects(replace(ALL, secrets=STORED.secrets, pooled=True))
    labels = documents_of_pod["deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels.pop("inference.networking.k8s.io/engine-type") == "build-repo"
    assert documents_of_pod["service"]["spec"]["selector"] == labels
    assert (
        "--triton-metrics=http://127.0.0.1:8002/metrics"
        in _containers(pod(replace(ALL, pooled=True)))["gateway"]["args"]
    )
    for name in ("deployment", "disruption-budget", "pod-monitor", "inference-pool"):
        assert documents_of_pod[name]["spec"]["selector"]["matchLabels"] == labels, name
    assert documents_of_pod["network-policy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert "replicas" not in documents_of_pod["deployment"]["spec"], "they are for the autoscaler to say"
    assert objects(STORED)["deployment"]["spec"]["replicas"] == 2
    (port,) = documents_of_pod["service"]["spec"]["ports"]
    assert port["targetPort"] in {p["name"] for p in _containers(pod(ALL))["gateway"]["ports"]}

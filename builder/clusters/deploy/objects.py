"""Objects of Kubernetes beside the pod: https://kubernetes.io/docs/reference/kubernetes-api/."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.pod import (
    GATEWAY_PORT,
    PULL_TIMEOUT_S,
    TRUSTED_KEY,
    Document,
    labels,
    pod,
    start_timeout_s,
    trusted_name,
)
from builder.clusters.deploy.scaling import scaled_object
from builder.repository.config.arguments import METRICS_PORT

HTTPS, DNS = 443, 53
MONITORING = "monitoring"  # the namespace of Prometheus, as its operator's own manifests have it
PICKER_PORT = 9002  # the endpoint picker's service, as its chart has it


def objects(deployment: Deployment) -> dict[str, Document]:
    """Return the objects, each by the name of its file."""
    documents = {
        "deployment": workload(deployment),
        "service": _service(deployment),
        "disruption-budget": disruption_budget(deployment),
        "network-policy": _network_policy(deployment),
        **trusted(deployment),
    }
    if deployment.monitored:
        documents["pod-monitor"] = pod_monitor(deployment, _gateway_endpoint(deployment))
    if deployment.scaling is not None:
        spec = scaled_object(deployment, deployment.scaling)
        documents["scaled-object"] = document(deployment, "keda.sh/v1alpha1", "ScaledObject", spec)
    if deployment.pooled:
        documents["inference-pool"] = _inference_pool(deployment)
    return documents


def document(deployment: Deployment, version: str, kind: str, spec: Document) -> Document:
    """Return an object named after the deployment."""
    metadata = {"name": deployment.name, "labels": labels(deployment)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def workload(deployment: Deployment) -> Document:
    """Return a Deployment whose replicas are replaced one after another, each new one before an old one is removed."""
    spec: Document = {
        "replicas": deployment.replicas,
        "selector": {"matchLabels": labels(deployment)},
        "progressDeadlineSeconds": start_timeout_s(deployment) + PULL_TIMEOUT_S,  # longer than the 600 s of Kubernetes
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {
            "metadata": {"labels": {**labels(deployment), **engine_label(deployment)}},
            "spec": pod(deployment),
        },
    }
    if deployment.scaling is not None:
        del spec["replicas"]  # KEDA decides; applying this again would undo its decision
    return document(deployment, "apps/v1", "Deployment", spec)


def engine_label(deployment: Deployment) -> Document:
    """Return the label that tells an endpoint picker whose metrics these are.

    Source: core-metrics-extractor of the inference extension.
    """
    return {"inference.networking.k8s.io/engine-type": "build-repo"} if deployment.pooled else {}


def trusted(deployment: Deployment) -> dict[str, Document]:
    """Return the key that pulled models must be signed with, which is not secret; empty if none is required."""
    if deployment.trusted is None:
        return {}
    metadata = {"name": trusted_name(deployment), "labels": labels(deployment)}
    data = {TRUSTED_KEY: deployment.trusted}
    return {"trusted": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}}


def _service(deployment: Deployment) -> Document:
    port = {"name": "http", "port": 80, "targetPort": "gateway", "appProtocol": "http"}
    return document(deployment, "v1", "Service", {"selector": labels(deployment), "ports": [port]})


def disruption_budget(deployment: Deployment) -> Document:
    """Return the budget that lets a drain of machines take away one replica at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels(deployment)}}
    return document(deployment, "policy/v1", "PodDisruptionBudget", spec)


def _network_policy(deployment: Deployment) -> Document:
    """Return the policy. In: clients of this namespace to the gateway, and monitoring.

    Out: DNS and, for pulls, the store.
    """
    ingress: list[Document] = [{"from": [{"podSelector": {}}], "ports": [_port(GATEWAY_PORT)]}]
    if deployment.monitored:
        ingress.append({"from": [_in_namespace(MONITORING)], "ports": [_port(METRICS_PORT), _port(GATEWAY_PORT)]})
    spec = {
        "podSelector": {"matchLabels": labels(deployment)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": _egress(deployment),
    }
    return document(deployment, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _egress(deployment: Deployment) -> list[Document]:
    if not deployment.stored:
        return []
    names = {"ports": [_port(DNS, "UDP"), _port(DNS)]}
    return [names, {"ports": [_port(_store_port(deployment))]}, *_in_cluster_store_rules(deployment)]


def _in_cluster_store_rules(deployment: Deployment) -> list[Document]:
    """Return the rule for a store that may be a service of the cluster; empty if the endpoint is outside.

    It opens the service's namespace on all ports: a policy sees the port of the pods, not that of the service. Names:
    https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
    """
    host = urlsplit(deployment.endpoint or "").hostname or ""
    service = re.fullmatch(r"[a-z][-a-z0-9]*(?:\.([a-z0-9][-a-z0-9]*)(?:\.svc(?:\.cluster\.local)?)?)?", host)
    if service is None:
        return []
    return [{"to": [_in_namespace(service[1] or deployment.namespace)]}]


def _in_namespace(name: str) -> Document:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _store_port(deployment: Deployment) -> int:
    if deployment.endpoint is None:
        return HTTPS
    parts = urlsplit(deployment.endpoint)
    return parts.port or (HTTPS if parts.scheme == "https" else 80)


def _port(number: int, protocol: str = "TCP") -> Document:
    return {"protocol": protocol, "port": number}


def pod_monitor(deployment: Deployment, *beside: Document) -> Document:
    """Return a PodMonitor of Prometheus' operator for the metrics of Triton, and those `beside` them."""
    spec = {
        "selector": {"matchLabels": labels(deployment)},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics"}, *beside],
    }
    return document(deployment, "monitoring.coreos.com/v1", "PodMonitor", spec)


def _gateway_endpoint(deployment: Deployment) -> Document:
    """Return the gateway's metrics endpoint. A gateway with keys requires one: the secret has it as `metrics`."""
    gateway: Document = {"port": "gateway", "path": "/metrics"}
    if deployment.secrets.keys is not None:
        gateway["authorization"] = {"credentials": {"name": deployment.secrets.keys, "key": "metrics"}}
    return gateway


def _inference_pool(deployment: Deployment) -> Document:
    """Return the pool of the Gateway API's inference extension, whose endpoint picker chooses the replica."""
    spec = {
        "selector": {"matchLabels": labels(deployment)},
        "targetPorts": [{"number": GATEWAY_PORT}],
        "endpointPickerRef": {"name": f"{deployment.name}-epp", "port": {"number": PICKER_PORT}},
    }
    return document(deployment, "inference.networking.k8s.io/v1", "InferencePool", spec)

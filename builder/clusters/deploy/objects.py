"""Objects of Kubernetes beside the pod: https://kubernetes.io/docs/reference/kubernetes-api/."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from builder.clusters.deploy.alerts import alert_rules
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
from builder.common.addresses import is_registry
from builder.common.registry_address import parse_address
from builder.repository.config.arguments import METRICS_PORT

HTTPS, DNS = 443, 53
MONITORING = "monitoring"  # the namespace of Prometheus, as its operator's own manifests have it
PICKER_PORT = 9002  # the endpoint picker's service, as its chart has it


def objects(deployment: Deployment) -> dict[str, Document]:
    """Return the objects, each by the name of its file."""
    port = {"name": "http", "port": 80, "targetPort": "gateway", "appProtocol": "http"}
    documents = {
        "deployment": workload(deployment),
        "service": document(deployment, "v1", "Service", {"selector": labels(deployment), "ports": [port]}),
        "disruption-budget": disruption_budget(deployment),
        "network-policy": _network_policy(deployment),
        **trusted(deployment),
    }
    if deployment.monitored:
        gateway: Document = {"port": "gateway", "path": "/metrics"}
        if deployment.secrets.keys is not None:  # a gateway with keys requires one: the secret has it as `metrics`
            gateway["authorization"] = {"credentials": {"name": deployment.secrets.keys, "key": "metrics"}}
        documents["pod-monitor"] = pod_monitor(deployment, gateway)
        documents["alerts"] = alerts(deployment, has_gateway=True)
    if deployment.scaling is not None:
        spec = scaled_object(deployment, deployment.scaling)
        documents["scaled-object"] = document(deployment, "keda.sh/v1alpha1", "ScaledObject", spec)
    if deployment.pooled:
        # the pool of the Gateway API's inference extension, whose endpoint picker chooses the replica
        pool = {
            "selector": {"matchLabels": labels(deployment)},
            "targetPorts": [{"number": GATEWAY_PORT}],
            "endpointPickerRef": {"name": f"{deployment.name}-epp", "port": {"number": PICKER_PORT}},
        }
        version = "inference.networking.k8s.io/v1"
        documents["inference-pool"] = document(deployment, version, "InferencePool", pool)
    return documents


def document(deployment: Deployment, version: str, kind: str, spec: Document) -> Document:
    """Return an object named after the deployment."""
    metadata = {"name": deployment.name, "labels": labels(deployment)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def workload(deployment: Deployment) -> Document:
    """Return a Deployment whose replicas are replaced one after another, each new one before an old one is removed."""
    pod_labels = labels(deployment)
    if deployment.pooled:  # so that an endpoint picker knows whose metrics these are: its core-metrics-extractor
        pod_labels["inference.networking.k8s.io/engine-type"] = "build-repo"
    spec: Document = {
        "replicas": deployment.replicas,
        "selector": {"matchLabels": labels(deployment)},
        "progressDeadlineSeconds": start_timeout_s(deployment) + PULL_TIMEOUT_S,  # longer than the 600 s of Kubernetes
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": pod_labels}, "spec": pod(deployment)},
    }
    if deployment.scaling is not None:
        del spec["replicas"]  # KEDA decides; applying this again would undo its decision
    return document(deployment, "apps/v1", "Deployment", spec)


def trusted(deployment: Deployment) -> dict[str, Document]:
    """Return the key that pulled models must be signed with, which is not secret; empty if none is required."""
    if deployment.trusted is None:
        return {}
    metadata = {"name": trusted_name(deployment), "labels": labels(deployment)}
    data = {TRUSTED_KEY: deployment.trusted}
    return {"trusted": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}}


def disruption_budget(deployment: Deployment) -> Document:
    """Return the budget that lets a drain of machines take away one replica at a time."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels(deployment)}}
    return document(deployment, "policy/v1", "PodDisruptionBudget", spec)


def _network_policy(deployment: Deployment) -> Document:
    """Return the policy. In: clients of this namespace to the gateway, and monitoring.

    Out: DNS and, for pulls, the store; for downloads of checkpoints, HTTPS.
    """
    ingress: list[Document] = [{"from": [{"podSelector": {}}], "ports": [_port(GATEWAY_PORT)]}]
    if deployment.monitored:
        ingress.append({"from": [_in_namespace(MONITORING)], "ports": [_port(METRICS_PORT), _port(GATEWAY_PORT)]})
    egress: list[Document] = []
    if deployment.stored or deployment.downloads:
        egress.append({"ports": [_port(DNS, "UDP"), _port(DNS)]})
    if deployment.downloads:  # the Hub
        egress.append({"ports": [_port(HTTPS)]})
    if deployment.stored:
        in_registry = is_registry(deployment.repository)
        address = parse_address(deployment.repository).endpoint if in_registry else deployment.endpoint
        endpoint = urlsplit(address or "https:")
        ports = {endpoint.port or (HTTPS if endpoint.scheme == "https" else 80)}
        if in_registry:  # it may send to an authorization service and to a storage of others
            ports.add(HTTPS)
        egress.append({"ports": [_port(port) for port in sorted(ports)]})
        egress += _in_cluster_store_rules(deployment, endpoint.hostname or "")
    spec = {
        "podSelector": {"matchLabels": labels(deployment)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return document(deployment, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _in_cluster_store_rules(deployment: Deployment, host: str) -> list[Document]:
    """Return the rule for a store that may be a service of the cluster; empty if its `host` is outside.

    It opens the service's namespace on all ports: a policy sees the port of the pods, not that of the service. Names:
    https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
    """
    service = re.fullmatch(r"[a-z][-a-z0-9]*(?:\.([a-z0-9][-a-z0-9]*)(?:\.svc(?:\.cluster\.local)?)?)?", host)
    if service is None:
        return []
    return [{"to": [_in_namespace(service[1] or deployment.namespace)]}]


def _in_namespace(name: str) -> Document:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _port(number: int, protocol: str = "TCP") -> Document:
    return {"protocol": protocol, "port": number}


def pod_monitor(deployment: Deployment, *beside: Document) -> Document:
    """Return a PodMonitor of Prometheus' operator for the metrics of Triton, and those `beside` them."""
    spec = {
        "selector": {"matchLabels": labels(deployment)},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics"}, *beside],
    }
    return document(deployment, "monitoring.coreos.com/v1", "PodMonitor", spec)


def alerts(deployment: Deployment, has_gateway: bool) -> Document:
    """Return a PrometheusRule of Prometheus' operator."""
    return document(deployment, "monitoring.coreos.com/v1", "PrometheusRule", alert_rules(deployment, has_gateway))

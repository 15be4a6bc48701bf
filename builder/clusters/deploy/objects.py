"""Objects of Kubernetes beside the pod: https://kubernetes.io/docs/reference/kubernetes-api/."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from builder.clusters.deploy import on_demand
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
from builder.repository.config.arguments import GRPC_PORT, METRICS_PORT

HTTPS, DNS = 443, 53
MONITORING = "monitoring"  # the namespace of Prometheus, as its operator's own manifests have it
TRITON_METRICS: Document = {"port": "metrics", "path": "/metrics"}
PICKER_PORT = 9002  # the endpoint picker's service, as its chart has it


def objects(deployment: Deployment) -> dict[str, Document]:
    """Return the objects, each by the name of its file."""
    port = {"name": "http", "port": 80, "targetPort": "gateway", "appProtocol": "http"}
    documents = {
        "deployment": _workload(deployment),
        "service": document(deployment, "v1", "Service", {"selector": labels(deployment), "ports": [port]}),
        "disruption-budget": disruption_budget(deployment),
        "network-policy": _network_policy(deployment),
        **trusted(deployment),
        **(_tritons(deployment) if deployment.on_demand is not None else {}),
    }
    if deployment.monitored:
        gateway: Document = {"port": "gateway", "path": "/metrics"}
        if deployment.secrets.keys is not None:  # a gateway with keys requires one: the secret has it as `metrics`
            gateway["authorization"] = {"credentials": {"name": deployment.secrets.keys, "key": "metrics"}}
        beside_triton = deployment.on_demand is None
        documents["pod-monitor"] = pod_monitor(deployment, *([TRITON_METRICS] if beside_triton else []), gateway)
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


def _tritons(deployment: Deployment) -> dict[str, Document]:
    """Return the objects of Tritons that load models on demand, each by the name of its file.

    Their service has no address of its own: its name has the addresses of all Tritons that are ready and do not stop.
    """
    tritons = on_demand.of_tritons(deployment)
    found = {"clusterIP": "None", "selector": labels(tritons), "ports": [{"name": "grpc", "port": GRPC_PORT}]}
    workload = _rolling(tritons, on_demand.triton_pod(deployment))
    # so that gateways have found a new one before an old one stops
    workload["spec"] |= {"replicas": deployment.replicas, "minReadySeconds": on_demand.NOTICED_S}
    workload["spec"]["progressDeadlineSeconds"] += on_demand.NOTICED_S
    documents = {
        "tritons": workload,
        "tritons-service": document(tritons, "v1", "Service", found),
        "tritons-disruption-budget": disruption_budget(tritons),
        "tritons-network-policy": _network_policy_of_tritons(deployment),
    }
    if deployment.monitored:
        documents["tritons-pod-monitor"] = pod_monitor(tritons, TRITON_METRICS)
    return documents


def _workload(deployment: Deployment) -> Document:
    """Return the Deployment of the pods that answer clients."""
    if deployment.on_demand is not None:
        workload = _rolling(deployment, on_demand.gateway_pod(deployment))
        workload["spec"]["replicas"] = on_demand.GATEWAYS
        return workload
    workload = _rolling(deployment, pod(deployment))
    if deployment.pooled:  # so that an endpoint picker knows whose metrics these are: its core-metrics-extractor
        pod_labels = workload["spec"]["template"]["metadata"]["labels"]
        pod_labels["inference.networking.k8s.io/engine-type"] = "build-repo"
    if deployment.scaling is None:  # KEDA decides; applying this again would undo its decision
        workload["spec"]["replicas"] = deployment.replicas
    return workload


def _rolling(deployment: Deployment, spec: Document) -> Document:
    """Return a Deployment whose pods are replaced one after another, each new one before an old one is removed."""
    workload: Document = {
        "selector": {"matchLabels": labels(deployment)},
        "progressDeadlineSeconds": start_timeout_s(deployment) + PULL_TIMEOUT_S,  # longer than the 600 s of Kubernetes
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": labels(deployment)}, "spec": spec},
    }
    return document(deployment, "apps/v1", "Deployment", workload)


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
    """Return the policy. In: clients of this namespace to the gateway, and monitoring. Out: see `_egress`."""
    ingress: list[Document] = [{"from": [{"podSelector": {}}], "ports": [_port(GATEWAY_PORT)]}]
    metrics, egress = [GATEWAY_PORT], _egress(deployment)
    if deployment.on_demand is None:
        metrics.insert(0, METRICS_PORT)
    else:
        egress.append(_pods("to", on_demand.of_tritons(deployment), GRPC_PORT))
    if deployment.monitored:
        ingress.append({"from": [_in_namespace(MONITORING)], "ports": list(map(_port, metrics))})
    return _policy(deployment, ingress, egress)


def _network_policy_of_tritons(deployment: Deployment) -> Document:
    """Return the policy of Tritons, which whoever reaches can have load and unload models: the gateways alone do."""
    ingress = [_pods("from", deployment, GRPC_PORT)]
    if deployment.monitored:
        ingress.append({"from": [_in_namespace(MONITORING)], "ports": [_port(METRICS_PORT)]})
    return _policy(on_demand.of_tritons(deployment), ingress, _egress(deployment))


def _policy(deployment: Deployment, ingress: list[Document], egress: list[Document]) -> Document:
    spec = {
        "podSelector": {"matchLabels": labels(deployment)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return document(deployment, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _pods(direction: str, deployment: Deployment, port: int) -> Document:
    """Return the rule for the pods of a deployment; `direction`: "from" or "to"."""
    return {direction: [{"podSelector": {"matchLabels": labels(deployment)}}], "ports": [_port(port)]}


def _egress(deployment: Deployment) -> list[Document]:
    """Return the rules for DNS and, for pulls, the store; for downloads of checkpoints, HTTPS."""
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
    return egress


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


def pod_monitor(deployment: Deployment, *endpoints: Document) -> Document:
    """Return a PodMonitor of Prometheus' operator for the metrics at these endpoints of each pod."""
    spec = {"selector": {"matchLabels": labels(deployment)}, "podMetricsEndpoints": list(endpoints)}
    return document(deployment, "monitoring.coreos.com/v1", "PodMonitor", spec)


def alerts(deployment: Deployment, has_gateway: bool) -> Document:
    """Return a PrometheusRule of Prometheus' operator."""
    return document(deployment, "monitoring.coreos.com/v1", "PrometheusRule", alert_rules(deployment, has_gateway))

"""KServe: an InferenceService with the Open Inference Protocol (v2), and a ServingRuntime that is Triton as built here.

It uses KServe's deployment mode Standard, whose pods may have volumes and init containers. KServe's own storage
initializer reads folders, not the content-addressed store, so the pull is an init container here too. Clients reach
Triton itself: there is no gateway. Source: https://github.com/kserve/kserve, v0.20.0.
"""

from __future__ import annotations

from builder.clusters.deploy import pod
from builder.clusters.deploy.deployment import Deployment, Scaling
from builder.clusters.deploy.image import image_files
from builder.clusters.deploy.objects import TRITON_METRICS, alerts, disruption_budget, document, pod_monitor, trusted
from builder.clusters.deploy.placement import placement
from builder.clusters.deploy.pod import Document, image_steps
from builder.clusters.deploy.scaling import pods_pattern, scaling_behavior, wait_queries
from builder.clusters.deploy.targets import Target, to_yaml
from builder.common.errors import SpecError
from builder.repository.config.arguments import EXIT_TIMEOUT_S, METRICS_PORT

FORMAT = {"name": "build-repo", "version": "1"}
PROTOCOLS = ["v2", "grpc-v2"]
# For a Prometheus that reads annotations. KServe's own would name the port of its queue-proxy, which only the mode
# Knative has: pkg/webhook/admission/pod/metrics_aggregate_injector.go
SCRAPED = {
    "serving.kserve.io/enable-prometheus-scraping": "false",
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(METRICS_PORT),
    "prometheus.io/path": "/metrics",
}


def _files(deployment: Deployment) -> dict[str, str]:
    if deployment.secrets.keys or deployment.pooled or deployment.on_demand:
        raise SpecError(
            "--keys-secret, --inference-pool and --load-on-demand are of the gateway, which the target kserve does not "
            "have: leave them out, or deploy --to kubernetes"
        )
    manifests = {
        "serving-runtime.yaml": _runtime(deployment),
        "inference-service.yaml": _service(deployment),
        "disruption-budget.yaml": disruption_budget(deployment),
        **{f"{name}.yaml": document for name, document in trusted(deployment).items()},
    }
    if deployment.monitored:
        manifests["pod-monitor.yaml"] = pod_monitor(deployment, TRITON_METRICS)
        manifests["alerts.yaml"] = alerts(deployment, has_gateway=False)
    return {**{name: to_yaml(manifest) for name, manifest in manifests.items()}, **image_files(deployment)}


def _runtime(deployment: Deployment) -> Document:
    """Return Triton alone, as KServe's predictor container."""
    leaving = {"preStop": {"sleep": {"seconds": pod.PRESTOP_SLEEP_S}}}
    container = {**pod.triton(deployment), "name": "kserve-container", "lifecycle": leaving}
    spec = {
        "supportedModelFormats": [{**FORMAT, "autoSelect": False}],
        "protocolVersions": PROTOCOLS,
        "containers": [container],
        "volumes": pod.volumes(deployment),
    }
    return document(deployment, "serving.kserve.io/v1alpha1", "ServingRuntime", spec)


def _service(deployment: Deployment) -> Document:
    predictor: Document = {
        "labels": pod.labels(deployment),
        "annotations": SCRAPED,
        "model": {"modelFormat": FORMAT, "runtime": deployment.name, "protocolVersion": "v2"},
        "minReplicas": deployment.replicas,
        "maxReplicas": deployment.replicas,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": pod.PRESTOP_SLEEP_S + EXIT_TIMEOUT_S + 10,
        "securityContext": pod.pod_security(),
        "topologySpreadConstraints": pod.spread(deployment),
        "initContainers": pod.pulls(deployment),
        **placement(deployment),
    }
    if deployment.scaling is not None:
        predictor |= _scaling(deployment, deployment.scaling)
    service = document(deployment, "serving.kserve.io/v1beta1", "InferenceService", {"predictor": predictor})
    annotations = {"serving.kserve.io/deploymentMode": "Standard"}
    if deployment.scaling is not None:
        annotations["serving.kserve.io/autoscalerClass"] = "keda"
    service["metadata"]["annotations"] = annotations
    return service


def _scaling(deployment: Deployment, scaling: Scaling) -> Document:
    """Return the scaling by KEDA.

    KServe has KEDA divide by the number of replicas (keda_reconciler.go names no metricType), so that number is a
    factor here.
    """
    target = {"type": "Value", "value": str(scaling.queue_ms)}
    metrics: list[Document] = []
    for wait in wait_queries(deployment, f"{deployment.name}-predictor", with_gateway=False).values():
        query = f"{wait} * {replicas_query(deployment)}"
        metric = {"backend": "prometheus", "serverAddress": scaling.prometheus, "query": query}
        metrics.append({"type": "External", "external": {"metric": metric, "target": target}})
    autoscaling = {"metrics": metrics, "behavior": scaling_behavior()}
    return {"maxReplicas": scaling.max_replicas, "autoScaling": autoscaling}


def replicas_query(deployment: Deployment) -> str:
    """Return PromQL for the number of replicas."""
    of = f'namespace="{deployment.namespace}", pod=~"{pods_pattern(f"{deployment.name}-predictor")}"'
    return f"scalar(count(count by (pod) (nv_inference_request_success{{{of}}})))"


TARGET = Target(
    _files,
    steps=lambda deployment, output: [
        *image_steps(deployment, output, own=()),
        f"kubectl apply -n {deployment.namespace} -f {output}",
    ],
)

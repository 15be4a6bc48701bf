"""Alert rules for Prometheus' operator, over the metrics that a PodMonitor collects from the replicas."""

from __future__ import annotations

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.pod import Document

GATEWAY = "build_repo_gateway_responses_total"
FAILED, SUCCEEDED = "nv_inference_request_failure", "nv_inference_request_success"


def alert_rules(deployment: Deployment, has_gateway: bool) -> Document:
    """Return the spec of a PrometheusRule. Without gateways, errors are those of Triton."""
    job = f'job="{deployment.namespace}/{deployment.name}"'  # as the operator names that of a PodMonitor
    if has_gateway:
        errors, refusals = f'{GATEWAY}{{{job}, status=~"5.."}}', f'{GATEWAY}{{{job}, status="429"}}'
        whole = f"{GATEWAY}{{{job}}}"
    else:
        errors, refusals = f'{FAILED}{{{job}, reason!~"REJECTED|CANCELED"}}', f'{FAILED}{{{job}, reason="REJECTED"}}'
        whole = f"{SUCCEEDED}{{{job}}}"
    rules = [
        _rule(
            "ReplicasMissing",
            f"(count(up{{{job}}} == 1) or vector(0)) == 0",
            "2m",
            "critical",
            "No replica answers Prometheus. Look at the pods, their events and the log of the container triton.",
        ),
        _rule(
            "RequestsFail",
            f"{_rate(errors)} > 0.01 * {_rate(whole)}",
            "5m",
            "warning",
            "More than 1% of the requests fail. The log of the container triton has the reason.",
        ),
        _rule(
            "RequestsAreRefused",
            f"{_rate(refusals)} > 0.05 * {_rate(whole)}",
            "5m",
            "warning",
            "More than 5% of the requests are refused, because a queue is full or a key has used up its limits. Add "
            "replicas, or raise the limits.",
        ),
    ]
    return {"groups": [{"name": deployment.name, "rules": rules}]}


def _rate(series: str) -> str:
    return f"sum(rate({series}[5m]))"


def _rule(name: str, expression: str, lasting: str, severity: str, description: str) -> Document:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"description": description},
    }

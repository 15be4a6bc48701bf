"""Number of replicas by how long requests wait, as Triton and the gateway themselves measure it.

Source of the fields: https://keda.sh/docs/2.20/reference/scaledobject-spec/ and .../scalers/prometheus/
"""

from __future__ import annotations

import re
from typing import Any

from builder.clusters.deploy.deployment import Deployment, Scaling

RATE_WINDOW = "1m"
STABILIZATION_WINDOW_S = 300  # of less load until replicas are removed: they take a while to come back


def wait_queries(deployment: Deployment, pods: str, with_gateway: bool = True) -> dict[str, str]:
    """Return PromQL by trigger name: mean milliseconds that a request waits for the model with the longest wait.

    A request waits in Triton's batcher, in the fronts of encoders that took it out of the batcher, and in the queues of
    decode loops. The result is 0 without requests: clamp_min prevents 0/0.

    `pods`: the name of their Deployment. A gateway knows how long each request waited; without one, as many wait as
    arrive in the time that they wait (Little's law).
    """
    of = f'namespace="{deployment.namespace}", pod=~"{pods_pattern(pods)}"'
    batched = "|".join(re.escape(model.name) for model in deployment.models if not model.generates)
    by_name = {}
    if batched:  # fronts only: nothing else calls their engines
        of_fronts = f'{of}, model=~"{batched}"'.replace("\\", "\\\\")
        answered = "nv_inference_request_success"
        by_name["batcher"] = _mean_wait("nv_inference_queue_duration_us", answered, of_fronts, "model", "/ 1000")
        by_name["front"] = _mean_wait("build_repo_waited_seconds_total", answered, of_fronts, "model", "* 1000")
    if any(model.generates for model in deployment.models):
        if with_gateway:
            queue = "vllm:request_queue_time_seconds"
            by_name["decode-loop"] = _mean_wait(f"{queue}_sum", f"{queue}_count", of, "model_name", "* 1000")
        else:
            waiting = f"sum by (model) (avg_over_time(build_repo_waiting{{{of}}}[{RATE_WINDOW}]))"
            arriving = f"sum by (model) (rate(build_repo_requests_total{{{of}}}[{RATE_WINDOW}]))"
            by_name["decode-loop"] = f"max({waiting} / clamp_min({arriving}, 0.001)) * 1000"
    return by_name


def pods_pattern(name: str) -> str:
    """Return a regular expression for the pods of the Deployment `name` alone: search-gpu is not search.

    Names of pods end in two hashes, which are one if Kubernetes has cut a long name.
    """
    return f"{name}-[a-z0-9]+(-[a-z0-9]+)?"


def scaled_object(deployment: Deployment, scaling: Scaling) -> dict[str, Any]:
    """Return KEDA's ScaledObject: the longest of the measured waits decides."""
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment.name},
        "minReplicaCount": deployment.replicas,
        "maxReplicaCount": scaling.max_replicas,
        "pollingInterval": 15,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": scaling_behavior()}},
        "triggers": [
            {
                "type": "prometheus",
                "name": name,
                "metricType": "Value",  # a mean of all replicas, not a sum of theirs
                "metadata": {
                    "serverAddress": scaling.prometheus,
                    "query": query,
                    "threshold": str(scaling.queue_ms),
                },
            }
            for name, query in wait_queries(deployment, deployment.name).items()
        ],
    }


def scaling_behavior() -> dict[str, Any]:
    """Return how fast replicas come and go: at most twice as many each minute; one fewer each minute, after a while."""
    return {
        "scaleUp": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}]},
        "scaleDown": {
            "stabilizationWindowSeconds": STABILIZATION_WINDOW_S,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        },
    }


def _mean_wait(time: str, count: str, of: str, model: str, unit: str) -> str:
    total, number = (f"sum by ({model}) (rate({metric}{{{of}}}[{RATE_WINDOW}]))" for metric in (time, count))
    return f"max({total} / clamp_min({number}, 0.001)) {unit}"

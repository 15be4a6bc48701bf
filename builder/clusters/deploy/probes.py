"""Probes of Triton's container.

A server may hang and still report that it is ready, so the live probe asks it for an inference
(builder.repository.liveness).
"""

from __future__ import annotations

import shlex
from typing import Any

from builder.clusters.deploy.deployment import DeployedModel, Deployment
from builder.common.releases import version_tuple
from builder.repository.config.arguments import GRPC_PORT, HTTP_PORT, METRICS_PORT
from builder.repository.liveness import ask_command

HTTP_API = f"http://127.0.0.1:{HTTP_PORT}/v2"
REQUEST_TIMEOUT_S = 4  # to answer one request; a model that is only busy is not dead
DEAD_STUB_ERROR = "is not healthy"  # python_backend: "Stub process '...' is not healthy."
# From this release on the server is not ready if a loaded model is not: core, pull request 473, looked for in each
# rYY.MM. The model alone is not since 25.12 (core, 461), and by its own is_ready since 26.03 (python_backend, 430).
READINESS_COVERS_MODELS_SINCE = "26.04"
LIVE_PROBE_PERIOD_S, LIVE_PROBE_FAILURES = 5, 3  # the server is restarted after so many failures in a row
KILL_GRACE_S = 8  # for running requests; a server that hangs does not end before it

# A failed decode loop reports it in the metrics.
METRICS_URL = f"http://127.0.0.1:{METRICS_PORT}/metrics"
CHECK_DECODE_LOOPS = f"""metrics=$(curl --silent --max-time {REQUEST_TIMEOUT_S} {METRICS_URL} || true)
if echo "$metrics" | grep --quiet --extended-regexp '^build_repo_healthy.* 0(\\.0+)?$'; then exit 1; fi"""


def ready_probe(deployment: Deployment) -> dict[str, Any]:
    """Return a probe that all models are loaded, and those that are probed by themselves ready.

    With models on demand it asks if the server runs: it is not ready while it loads a model.
    """
    if deployment.on_demand is not None:
        return {"httpGet": {"path": "/v2/health/live", "port": "http"}}
    if not deployment.probed:
        return {"httpGet": {"path": "/v2/health/ready", "port": "http"}}
    urls = [f"{HTTP_API}/health/ready", *(f"{HTTP_API}/models/{name}/ready" for name in deployment.probed)]
    return {"exec": {"command": ["curl", "--fail", "--silent", "--fail-early", *urls]}}


def live_probe(deployment: Deployment) -> dict[str, Any]:
    """Return a probe that restarts a server within 30 s of the last inference that it answered.

    Where no model is loaded or unloaded while it runs, it stays ready once it is. For a probed model only the answer
    that its process is dead counts: one that is busy, or refuses because its queue is full, is not restarted.
    """
    models = [model for model in deployment.models if model.name in deployment.probed]
    ask = ask_command(f"127.0.0.1:{GRPC_PORT}", REQUEST_TIMEOUT_S)
    covers_models = version_tuple(deployment.release) >= version_tuple(READINESS_COVERS_MODELS_SINCE)
    stays_ready = deployment.on_demand is None and covers_models
    health = f"{HTTP_API}/health/{'ready' if stays_ready else 'live'}"
    server = f"curl --fail --silent --max-time {REQUEST_TIMEOUT_S} {health}"
    script = "\n".join([ask, server, *([CHECK_DECODE_LOOPS] if models else []), *map(_probe_model, models)])
    return {
        "exec": {"command": ["sh", "-ec", script]},
        "periodSeconds": LIVE_PROBE_PERIOD_S,
        "timeoutSeconds": REQUEST_TIMEOUT_S * (len(models) + 3) + 2,
        "failureThreshold": LIVE_PROBE_FAILURES,
        "terminationGracePeriodSeconds": KILL_GRACE_S,
    }


def _probe_model(model: DeployedModel) -> str:
    url = f"{HTTP_API}/models/{model.name}/generate"
    answer = f"answer=$(curl --silent --max-time {REQUEST_TIMEOUT_S} --data {shlex.quote(model.request)} {url} || true)"
    return f'{answer}\ncase $answer in *"{DEAD_STUB_ERROR}"*) exit 1 ;; esac'

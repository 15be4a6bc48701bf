"""How Triton is asked whether it is well. A model whose process died stays ready for Triton and fails each request."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from builder.deploy.deployment import Deployment, Model
from builder.triton.arguments import HTTP_PORT, METRICS_PORT

ADDRESS = f"http://127.0.0.1:{HTTP_PORT}/v2"
ANSWER_S = 5  # to one request; a model that is only busy is not a dead one
DEAD = "is not healthy"  # python_backend: "Stub process '...' is not healthy."


# a decode loop that failed says so among the metrics
LOOPS = f"""metrics=$(curl --silent --max-time {ANSWER_S} http://127.0.0.1:{METRICS_PORT}/metrics || true)
if echo "$metrics" | grep --quiet --extended-regexp '^build_repo_healthy.* 0(\\.0+)?$'; then exit 1; fi"""


def ready_probe(probed: Sequence[str]) -> dict[str, Any]:
    """All models that load are there; where some are named, those."""
    if not probed:
        return {"httpGet": {"path": "/v2/health/ready", "port": "http"}}
    asked = " ".join(f"{ADDRESS}/models/{name}/ready" for name in probed)
    return {"exec": {"command": ["curl", "--fail", "--silent", "--fail-early", *asked.split()]}}


def request_probe(deployment: Deployment) -> dict[str, Any]:
    """One request to each model that is probed. Only an answer that its process is dead counts: a server that is busy,
    or refuses because its queue is full, is not started again.
    """
    models = [model for model in deployment.models if model.name in deployment.probed]
    script = "\n".join([f"curl --fail --silent --max-time {ANSWER_S} {ADDRESS}/health/live", LOOPS, *map(_ask, models)])
    return {
        "exec": {"command": ["sh", "-ec", script]},
        "periodSeconds": 30,
        "timeoutSeconds": ANSWER_S * (len(models) + 2) + 5,
        "failureThreshold": 2,
    }


def _ask(model: Model) -> str:
    url = f"{ADDRESS}/models/{model.name}/generate"
    answer = f"answer=$(curl --silent --max-time {ANSWER_S} --data {shlex.quote(model.request)} {url} || true)"
    return f'{answer}\ncase $answer in *"{DEAD}"*) exit 1 ;; esac'

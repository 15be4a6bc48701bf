"""How Triton is asked whether it is well.

It may hang and go on saying that it is ready, so it has to answer an inference (builder.triton.liveness). Before
release 26.04 it also says that it is ready while a model whose process died fails each request.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from builder.deploy.deployment import Deployment, Model
from builder.triton.arguments import GRPC_PORT, HTTP_PORT, METRICS_PORT
from builder.triton.liveness import ask_command
from builder.triton.releases import version_tuple

ADDRESS = f"http://127.0.0.1:{HTTP_PORT}/v2"
ANSWER_S = 4  # to one request; a model that is only busy is not a dead one
DEAD = "is not healthy"  # python_backend: "Stub process '...' is not healthy."
# From here on the server is not ready where a model that was loaded is not: core, pull request 473, looked for in each
# rYY.MM. The model alone is not since 25.12 (core, 461), and by its own is_ready since 26.03 (python_backend, 430).
SAYS_SO_SINCE = "26.04"
PERIOD_S, MISSES = 5, 3  # from one look to the next, and how many in a row have to fail
GRACE_S = 8  # for what runs; a server that hangs does not end before it

# a decode loop that failed says so among the metrics
LOOPS = f"""metrics=$(curl --silent --max-time {ANSWER_S} http://127.0.0.1:{METRICS_PORT}/metrics || true)
if echo "$metrics" | grep --quiet --extended-regexp '^build_repo_healthy.* 0(\\.0+)?$'; then exit 1; fi"""


def ready_probe(probed: Sequence[str]) -> dict[str, Any]:
    """All models that load are there; where some are named, those say so themselves too."""
    if not probed:
        return {"httpGet": {"path": "/v2/health/ready", "port": "http"}}
    urls = [f"{ADDRESS}/health/ready", *(f"{ADDRESS}/models/{name}/ready" for name in probed)]
    return {"exec": {"command": ["curl", "--fail", "--silent", "--fail-early", *urls]}}


def live_probe(deployment: Deployment) -> dict[str, Any]:
    """Have a server started again within 30 s of the last inference that it answered.

    No model is loaded or unloaded while it runs: once ready, it stays so. Of a model that is probed, only an answer
    that its process is dead counts: one that is busy, or refuses because its queue is full, is not started again.
    """
    models = [model for model in deployment.models if model.name in deployment.probed]
    ask = ask_command(f"127.0.0.1:{GRPC_PORT}", ANSWER_S)
    server = f"curl --fail --silent --max-time {ANSWER_S} {ADDRESS}/health/{_health(deployment)}"
    script = "\n".join([ask, server, *([LOOPS] if models else []), *map(_ask, models)])
    return {
        "exec": {"command": ["sh", "-ec", script]},
        "periodSeconds": PERIOD_S,
        "timeoutSeconds": ANSWER_S * (len(models) + 3) + 2,
        "failureThreshold": MISSES,
        "terminationGracePeriodSeconds": GRACE_S,
    }


def _health(deployment: Deployment) -> str:
    """What of the server's health says most: whether its models are well, where its release knows that."""
    return "ready" if version_tuple(deployment.release) >= version_tuple(SAYS_SO_SINCE) else "live"


def _ask(model: Model) -> str:
    url = f"{ADDRESS}/models/{model.name}/generate"
    answer = f"answer=$(curl --silent --max-time {ANSWER_S} --data {shlex.quote(model.request)} {url} || true)"
    return f'{answer}\ncase $answer in *"{DEAD}"*) exit 1 ;; esac'

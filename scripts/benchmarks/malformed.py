"""Thousands of malformed requests to the gateway over a real Triton: `scripts/bench malformed`.

They follow the OpenAPI document that the gateway serves: nearly what it allows, with fields of another type, out of
range, missing or too many. No answer may be a server error (500 and above), and afterwards every slot must be free.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from builder.checkpoints.libraries import quiet_libraries
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks.circumstances import report_figures
from scripts.benchmarks.fuzz import make_models
from tests.serving.gateway.malformed import Sent, requests

MODELS = ("encoder", "decoder")
TASKS = ("text-classification", "text-generation")
SLOTS = 4  # of the decoder


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench malformed")
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="default 10000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, port = make_models(Path(scratch)), free_ports().http
        with running(folder) as server, gateway(server.url, "127.0.0.1", port):
            report = measure(port, options.requests, options.seed)
    report_figures(options.output, report)
    assert not report["faults"], report["faults"]


def measure(port: int, count: int, number: int) -> dict[str, Any]:
    """Return the statuses by route, the server errors, and the time in which every slot answers afterwards."""
    statuses: Counter[str] = Counter()
    faults: list[Any] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    _, document = _get(connection, "/openapi.json")
    started = time.monotonic()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(json.loads(document), MODELS, TASKS))
    def send(sent: Sent) -> None:
        status, answer = _post(connection, sent.path, sent.body)
        statuses[str(status)] += 1
        if status >= 500:
            faults.append([sent.path, sent.body, status, answer.decode("utf-8", "replace")])

    send()
    seconds = time.monotonic() - started
    return {
        "requests": sum(statuses.values()),
        "seconds": round(seconds),
        "statuses": dict(sorted(statuses.items())),
        "faults": faults[:20],
        "answered_afterwards": asyncio.run(_all_slots(port)),
    }


async def _all_slots(port: int) -> int:
    """Return how many answers succeed at once when as many are requested as there are slots."""
    body = {"model": "decoder", "prompt": "The", "max_tokens": 8, "ignore_eos": True}

    def one() -> int:
        return _post(http.client.HTTPConnection("127.0.0.1", port, timeout=60), "/v1/completions", body)[0]

    return (await asyncio.gather(*(asyncio.to_thread(one) for _ in range(SLOTS)))).count(200)


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, bytes]:
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def _post(connection: http.client.HTTPConnection, path: str, body: Any) -> tuple[int, bytes]:
    connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


if __name__ == "__main__":
    main()

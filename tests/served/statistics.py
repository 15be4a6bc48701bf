"""Triton's counts of a model."""

from __future__ import annotations

import time
from typing import Any

from builder.serving.client.client import Client

TRIES = 20  # attempts at concurrent requests, which a busy machine may serialise


def settled(served: Client, least: int = 0) -> dict[str, Any]:
    """Return Triton's counts once they include at least `least` requests and no longer change.

    Triton counts a request a little after it has answered it.
    """
    last = served.statistics()
    while True:
        time.sleep(0.2)
        now = served.statistics()
        if now == last and counted(now)[0] >= least:
            return now
        last = now


def counted(statistics: dict[str, Any]) -> tuple[int, int]:
    """Return the requests and executions."""
    return int(statistics.get("inference_count", 0)), int(statistics.get("execution_count", 0))

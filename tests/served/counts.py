"""Counters of a generating model on a running Triton, from Triton's own /metrics."""

from __future__ import annotations

import urllib.request

from builder.serving.server.triton import TritonServer


def counts(server: TritonServer, model: str) -> dict[str, float]:
    """Return the newest value of each counter, which a model publishes once a second."""
    with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=300) as response:
        lines = response.read().decode().splitlines()
    mine = [line for line in lines if line.startswith("build_repo_") and f'model="{model}"' in line]
    return {line.split("{")[0].removeprefix("build_repo_"): float(line.rsplit(" ", 1)[1]) for line in mine}

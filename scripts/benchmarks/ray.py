"""Measure how replicas on Ray start and stop: `scripts/bench ray`.

Clients ask for embeddings of all-MiniLM-L6-v2 in int8 until Ray has started a second replica; then they stop until Ray
has ended it. No request may fail. `scripts/bench cluster` measures what a fleet on Ray costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builder.building.pipeline import build
from builder.clusters.ray.cluster import NAME, RayOptions, connected, serving
from builder.options import make_spec
from builder.serving.server.triton import free_ports
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.cluster import embeddings
from scripts.benchmarks.gateway import Through
from tests.models import minilm

BUSY = 4  # target of concurrent requests per replica
SHRINK_AFTER_S = 10.0  # Ray waits for ten minutes by itself
PATIENCE_S = 240.0  # for a replica to start or to stop


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench ray")
    parser.add_argument("--repository", type=Path, help="keep the model here; built there where it is not")
    parser.add_argument("--clients", type=int, default=16, help="that ask at once (default 16)")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch) / "repository"
        if not (folder / "minilm").exists():
            build(make_spec(model=str(minilm()), name="minilm", output=folder, precision="int8"))
        figures = grow(folder, options.clients)
    print(json.dumps(figures))
    write_figures(options.output, {**circumstances(), "grow": figures})


def grow(folder: Path, clients: int) -> dict[str, Any]:
    """Return the seconds until another replica ran, and until it stopped after the last request.

    Also return how many requests were answered meanwhile; all of them must be.
    """
    asked = RayOptions(
        repository=str(folder.resolve()), max_replicas=2, busy=BUSY, shrink_after_s=SHRINK_AFTER_S, cores=0.25
    )
    port, counts = free_ports().http, list[int]()

    def ask(clients: int = clients) -> None:  # a request that fails raises an error
        counts.append(asyncio.run(embeddings(lambda: [Through(port)], clients, 2)))

    with connected(None), serving(asked, "127.0.0.1", port):
        ask(1)
        runs = _seconds_until(lambda: replicas() == {"RUNNING": 2}, ask)
        leaving_s = _seconds_until(lambda: replicas() == {"RUNNING": 1}, lambda: time.sleep(0.5))
        ask(1)
    return {"clients": clients, "runs_s": runs, "gone_s": leaving_s, "requests": sum(counts)}


def _seconds_until(there: Callable[[], bool], meanwhile: Callable[[], object]) -> float:
    started = time.perf_counter()
    while not there():
        assert time.perf_counter() - started < PATIENCE_S, f"replicas after {PATIENCE_S:.0f} s: {replicas()}"
        meanwhile()
    return round(time.perf_counter() - started, 1)


def replicas() -> dict[str, int]:
    """Return the number of replicas by state."""
    from ray import serve

    return dict(serve.status().applications[NAME].deployments["Triton"].replica_states)


if __name__ == "__main__":
    main()

"""Cost of Ray: `scripts/bench ray`.

Embeddings of all-MiniLM-L6-v2 in int8, asked by clients that each wait for their answer: through the gateway over one
Triton, and over the Tritons of 1, 2 and 4 replicas on Ray, by turns. On a machine whose cores one Triton keeps busy,
this shows the overhead and how fair it is to the clients, and not how it scales.

With --grow instead: how replicas start and stop. Clients send one replica more requests at once than it should have
until Ray has started another; then they stop until Ray has ended it. No request may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from builder.building.pipeline import build
from builder.clusters.ray.cluster import NAME, RayOptions, connected, serving
from builder.options import make_spec
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.gateway import Through
from tests.models import minilm

REPLICAS = (1, 2, 4)
BUSY = 4  # target of concurrent requests per replica
ROUNDS = 2
SHRINK_AFTER_S = 10.0  # Ray waits for ten minutes by itself
PATIENCE_S = 240.0  # for a replica to start or to stop


@dataclass(frozen=True)
class Turn:
    """Requests of each client to one side in one turn, and the milliseconds of each request."""

    counts: list[int]
    ms: list[float]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench ray")
    parser.add_argument("--repository", type=Path, help="keep the model here; built there where it is not")
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help="one run each (default 1 2 4)")
    parser.add_argument("--seconds", type=float, default=5, help="of each turn (default 5)")
    parser.add_argument("--clients", type=int, default=32, help="that ask at once (default 32)")
    parser.add_argument("--grow", action="store_true", help="from one replica to two and back, instead of all else")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch) / "repository"
        if not (folder / "minilm").exists():
            build(make_spec(model=str(minilm()), name="minilm", output=folder, precision="int8"))
        if options.grow:
            print(json.dumps(grow(folder, options.clients)))
            return
        port = free_ports().http
        with running(folder) as server, gateway(server.url, "127.0.0.1", port), connected(None):
            rows = [row for replicas in options.replicas for row in measure(folder, replicas, port, options)]
    show(rows)
    if options.output:
        write_figures(options.output, {**circumstances(), "clients": options.clients, "ray": rows})


def measure(folder: Path, replicas: int, port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the gateway and `replicas` by turns."""
    deployed = RayOptions(
        repository=str(folder.resolve()), min_replicas=replicas, max_replicas=replicas, busy=BUSY, cores=0.25
    )
    ray_port = free_ports().http
    with serving(deployed, "127.0.0.1", ray_port):
        sides = {"gateway": port, f"Ray, {replicas}": ray_port}
        for side in sides.values():
            asyncio.run(turn(side, options.clients, 3))
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, side in sides.items():
                turns[name].append(asyncio.run(turn(side, options.clients, options.seconds)))
        alone = {name: asyncio.run(turn(side, 1, 2)) for name, side in sides.items()}
    rows = [_row(name, replicas, turns[name], alone[name]) for name in sides]
    print(json.dumps(rows), flush=True)
    return rows


def grow(folder: Path, clients: int) -> dict[str, Any]:
    """Return the seconds until another replica ran, and until it stopped after the last request.

    Also return how many requests were answered meanwhile; all of them must be.
    """
    asked = RayOptions(
        repository=str(folder.resolve()), max_replicas=2, busy=BUSY, shrink_after_s=SHRINK_AFTER_S, cores=0.25
    )
    port, counts = free_ports().http, list[int]()

    def ask() -> None:
        counts.extend(asyncio.run(turn(port, clients, 2)).counts)  # a request that fails raises an error

    with connected(None), serving(asked, "127.0.0.1", port):
        asyncio.run(turn(port, 1, 1))
        runs = _seconds_until(lambda: replicas() == {"RUNNING": 2}, ask)
        gone = _seconds_until(lambda: replicas() == {"RUNNING": 1}, lambda: time.sleep(0.5))
        asyncio.run(turn(port, 1, 1))
    return {"runs_s": runs, "gone_s": gone, "requests": sum(counts)}


def _seconds_until(there: Callable[[], bool], meanwhile: Callable[[], object]) -> float:
    begun = time.perf_counter()
    while not there():
        assert time.perf_counter() - begun < PATIENCE_S, f"replicas after {PATIENCE_S:.0f} s: {replicas()}"
        meanwhile()
    return round(time.perf_counter() - begun, 1)


def replicas() -> dict[str, int]:
    """Return the number of replicas by state."""
    from ray import serve

    return dict(serve.status().applications[NAME].deployments["Triton"].replica_states)


async def turn(port: int, clients: int, seconds: float) -> Turn:
    """Run clients that ask one request after the other."""
    side, ms, begun = Through(port), list[float](), time.perf_counter()

    async def client() -> int:
        count = 0
        while time.perf_counter() - begun < seconds:
            ms.append(await side.embed())
            count += 1
        return count

    counts = await asyncio.gather(*(client() for _ in range(clients)))
    for _, writer in side.idle:
        writer.close()
    return Turn(list(counts), ms, time.perf_counter() - begun)


def fairness(counts: list[int]) -> float:
    """Return Jain's index: 1 if all clients had the same, 1/n if one had all (R. Jain et al., DEC-TR-301, 1984)."""
    return sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))


def _row(name: str, replicas: int, turns: list[Turn], alone: Turn) -> dict[str, Any]:
    ms = [value for turn in turns for value in turn.ms]
    return {
        "side": name,
        "replicas": replicas,
        "requests_s": [round(sum(turn.counts) / turn.seconds, 1) for turn in turns],
        "p50_ms": round(float(np.percentile(ms, 50)), 1),
        "p99_ms": round(float(np.percentile(ms, 99)), 1),
        "fairness": round(min(fairness(turn.counts) for turn in turns), 3),
        "alone_p50_ms": round(float(np.percentile(alone.ms, 50)), 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="embeddings, by turns", title_justify="left")
    for column in ("side", "beside", "requests/s", "p50, ms", "p99, ms", "fairness", "one client, ms"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for row in rows:
        rates = " ".join(f"{rate:.0f}" for rate in row["requests_s"])
        values = [row["p50_ms"], row["p99_ms"], row["fairness"], row["alone_p50_ms"]]
        table.add_row(row["side"], str(row["replicas"]), rates, *map(str, values))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Many Tritons behind one gateway: `scripts/bench cluster`.

1. Overhead, by turns in one run: the gateway over one Triton, the gateway over four, and four others that Ray runs.
   Embeddings of all-MiniLM-L6-v2 and streams of a decoder (GPT-2 124M shape, random weights), both in int8.
2. Failures of real processes under load, as `cluster_failures` describes.
3. Ten times as many models as one Triton has memory for, as `cluster_models` describes.
4. What the smaller batches of four Tritons cost, and what the gateway costs: embeddings of clients that ask one Triton
   and four in turn directly, beside clients of the gateways over the same.

All share this machine's cores: the first part shows what a fleet costs, not how it scales.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from builder.clusters.ray.cluster import RayOptions, connected, serving
from builder.common.samples import TEXTS
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks import cluster_failures, cluster_models
from scripts.benchmarks.circumstances import circumstances, refuse_other_machine, write_figures
from scripts.benchmarks.embedding_servers import Door, closed_loop
from scripts.benchmarks.gateway import Direct, Through, make_models, rate

PARTS = ("overhead", "failures", "models", "batches")
TRITONS = 4
CLIENTS = (1, 8, 32)
ROUNDS = 2
WARM_UP_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench cluster")
    parser.add_argument("--repository", type=Path, help="keep the models of all parts under this folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=5, help="of each side, number of clients and round (default 5)"
    )
    parser.add_argument("--failure-seconds", type=float, default=60, help="of each kind of failure (default 60)")
    parser.add_argument(
        "--failures", nargs="+", choices=cluster_failures.FAILURES, default=list(cluster_failures.FAILURES)
    )
    parser.add_argument("--models", type=int, default=500, help="of the third part (default 500)")
    parser.add_argument("--model-seconds", type=float, default=180, help="of each turn of the third part (default 180)")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = circumstances()
    refuse_other_machine(options.output, figures)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch)
        if "overhead" in options.parts:
            make_models(folder / "overhead")
            figures["overhead"] = overhead(folder / "overhead", options.seconds)
            show("overhead", figures["overhead"])
        if "failures" in options.parts:
            cluster_failures.make_models(folder / "failures")
            figures["failures"] = cluster_failures.measure(
                folder / "failures", TRITONS, options.failure_seconds, options.failures
            )
            show("failures", [{"failure": name, **row} for name, row in figures["failures"].items()])
        if "batches" in options.parts:
            make_models(folder / "overhead")
            figures["batches"] = batches(folder / "overhead", options.seconds)
            show("batches", figures["batches"])
        if "models" in options.parts:
            repository = folder / "models" / "repository"
            figures["models"] = cluster_models.measure(repository, options.models, TRITONS, options.model_seconds)
            Console().print_json(data=figures["models"])
    write_figures(options.output, figures)


def overhead(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Return requests a second, latencies and tokens a second of each side and number of clients."""
    with sides(folder) as ports:
        for port in ports.values():
            _cell(port, max(CLIENTS), WARM_UP_S)
        rows = []
        for clients in CLIENTS:
            cells: dict[str, list[dict[str, float]]] = {side: [] for side in ports}
            for _ in range(ROUNDS):
                for side, port in ports.items():
                    cells[side].append(_cell(port, clients, seconds))
            rows += [{"side": side, "clients": clients, **_means(cells[side])} for side in ports]
    return rows


@contextmanager
def sides(folder: Path) -> Iterator[Mapping[str, int]]:
    """Run all sides; yield their ports. The gateway over one Triton shares the first with the gateway over all."""
    ports = {name: free_ports().http for name in ("gateway, 1", f"gateway, {TRITONS}", f"Ray, {TRITONS}")}
    one, all_of_them, ray = ports.values()
    deployed = RayOptions(repository=str(folder.resolve()), min_replicas=TRITONS, max_replicas=TRITONS, cores=0.25)
    with ExitStack() as stack:
        tritons = [stack.enter_context(running(folder)) for _ in range(TRITONS)]
        stack.enter_context(gateway(tritons[0].url, "127.0.0.1", one))
        stack.enter_context(gateway(",".join(triton.url for triton in tritons), "127.0.0.1", all_of_them))
        stack.enter_context(connected(None))
        stack.enter_context(serving(deployed, "127.0.0.1", ray))
        yield ports


def batches(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Return embeddings a second, asked directly and through gateways, from one Triton and from all of them.

    `cpu_ms`: processor time of the gateway for each, in milliseconds; 0 without one.
    """
    ports = [free_ports().http for _ in range(2)]
    with ExitStack() as stack:
        urls = [stack.enter_context(running(folder)).url for _ in range(TRITONS)]
        one, all_of_them = (
            psutil.Process(stack.enter_context(gateway(",".join(asked), "127.0.0.1", port, log=subprocess.DEVNULL)).pid)
            for port, asked in zip(ports, (urls[:1], urls), strict=True)
        )
        sides: dict[str, tuple[Callable[[], list[Direct] | list[Through]], psutil.Process | None]] = {
            "directly, 1": (lambda: [Direct(urls[0])], None),
            "gateway, 1": (lambda: [Through(ports[0])], one),
            f"directly, {TRITONS}": (lambda: [Direct(url) for url in urls], None),
            f"gateway, {TRITONS}": (lambda: [Through(ports[1])], all_of_them),
        }
        for connect, process in sides.values():
            _batch_cell(connect, process, max(CLIENTS), WARM_UP_S)
        rows = []
        for clients in CLIENTS:
            cells: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(2 * ROUNDS):
                for side, (connect, process) in sides.items():
                    cells[side].append(_batch_cell(connect, process, clients, seconds))
            rows += [{"side": side, "clients": clients, **_means(cells[side])} for side in sides]
    return rows


def _batch_cell(
    connect: Callable[[], list[Direct] | list[Through]], process: psutil.Process | None, clients: int, seconds: float
) -> dict[str, float]:
    began, spent = time.perf_counter(), _processor_s(process)
    count = asyncio.run(embeddings(connect, clients, seconds))
    elapsed = time.perf_counter() - began
    return {"requests_per_s": count / elapsed, "cpu_ms": 1000 * (_processor_s(process) - spent) / count}


def _processor_s(process: psutil.Process | None) -> float:
    return 0.0 if process is None else sum(process.cpu_times()[:2])


async def embeddings(connect: Callable[[], list[Direct] | list[Through]], clients: int, seconds: float) -> int:
    """Return how many embeddings so many clients got, which ask the servers in turn."""
    servers, end = connect(), time.perf_counter() + seconds

    async def client(number: int) -> int:
        count = 0
        while time.perf_counter() < end:
            await servers[(number + count) % len(servers)].embed()
            count += 1
        return count

    counts = await asyncio.gather(*(client(number) for number in range(clients)))
    for server in servers:
        await server.close()
    return sum(counts)


def _cell(port: int, clients: int, seconds: float) -> dict[str, float]:
    door = Door(port, "/v1/embeddings", lambda text: {"model": "minilm", "input": text})
    requests, p50, p99 = closed_loop(door, TEXTS, clients, seconds)
    tokens = asyncio.run(rate(Through(port), clients, seconds))
    return {"requests_per_s": requests, "p50_ms": p50, "p99_ms": p99, "tokens_per_s": tokens}


def _means(rounds: list[dict[str, float]]) -> dict[str, Any]:
    means = {name: round(mean(each[name] for each in rounds), 2) for name in rounds[0]}
    return {**means, "rounds": rounds}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = [name for name in rows[0] if name != "rounds"]
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""Many more models than memory: tiny classifiers behind one gateway over several Tritons, which load them on demand.

Each Triton may take the memory of a tenth of the models. Clients choose models by Zipf's law, and the labels of an
answer say which model gave it. In the middle half of the second turn one Triton is killed, and started again after it.
A request is cold if it waited for a load: the slowest requests, as many as the gateway counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from builder.serving.gateway.residency.memory import TritonProcesses, size_of
from builder.serving.server.gateway import gateway
from builder.serving.server.stubs import Stubs
from builder.serving.server.triton import TritonServer, free_ports, running
from scripts.benchmarks.fleet_changing import Fleet
from scripts.benchmarks.fleet_copies import VERSIONS
from scripts.benchmarks.fleet_serving import (
    SHORT,
    Seen,
    ask,
    ask_all,
    counted,
    difference,
    make_fleet,
    on_demand,
    quantiles,
)
from scripts.benchmarks.gateway import Through

SHARE = 10  # of the models, one in so many fits into the memory of one Triton
CLIENTS = 16
ZIPF = 1.1
MEASURED = 12  # models that are loaded to measure the memory of one
SAMPLE_S = 5.0


def measure(folder: Path, models: int, tritons: int, seconds: float) -> dict[str, Any]:
    """Return what became of the requests in each turn. Models that `folder` lacks are created, of hard links."""
    names = make_fleet(folder, models, 0, shared=False)
    server_bytes, model_bytes = sizes(folder, names[:MEASURED])
    fitting = len(names) // SHARE
    budget = server_bytes + fitting * model_bytes
    order = random.Random(2).sample(list(names), len(names))
    with ExitStack() as stack:
        ports = [free_ports() for _ in range(tritons)]

        def start(number: int) -> TritonServer:
            return stack.enter_context(running(folder, ports=ports[number], on_demand=True))

        servers = [start(number) for number in range(tritons)]
        port = free_ports().http
        options = ("--load-on-demand", "--repository", str(folder), "--memory-gb", str(budget / 1e9))
        urls = ",".join(server.url for server in servers)
        stack.enter_context(gateway(urls, "127.0.0.1", port, *options, log=subprocess.DEVNULL))

        def kill_for_a_while(seconds: float) -> None:
            time.sleep(seconds / 4)
            os.killpg(servers[1].process.pid, signal.SIGKILL)
            time.sleep(seconds / 2)
            servers[1] = start(1)

        turns: dict[str, Callable[[float], None]] = {"none": lambda _: None, "a Triton is killed": kill_for_a_while}
        through = Through(port)
        return {
            "models": len(names),
            "fitting": fitting,
            "model_mb": round(model_bytes / 1e6, 1),
            "budget_mb": round(budget / 1e6),
            "clients": CLIENTS,
            "seconds": seconds,
            "turns": {name: turn(through, order, servers, disturb, seconds) for name, disturb in turns.items()},
        }


def sizes(folder: Path, names: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of a Triton, and of one of the models `names` that have answered on it."""
    port = free_ports().http
    with running(folder, on_demand=True) as server, on_demand(server, folder, port, 4e9):
        processes, through = TritonProcesses(server.url), Through(port)
        processes.find()
        for name in names:
            assert asyncio.run(_alone(through, name))[0] == 200
        usage = processes.usage()
    return usage.server, sum(usage.models.values()) // len(names)


async def _alone(through: Through, name: str) -> tuple[int, str]:
    through.idle.clear()  # connections of another event loop
    return await ask(through, name, SHORT[0])


def turn(
    through: Through,
    order: Sequence[str],
    servers: Sequence[TritonServer],
    disturb: Callable[[float], None],
    seconds: float,
) -> dict[str, Any]:
    """Return the outcome of requests in so many seconds.

    `disturb` runs on this thread: a Triton ends with the thread that started it.
    """
    fleet = Fleet(order, {}, dict.fromkeys(order, (VERSIONS[-1], 0.0)), TritonProcesses(servers[0].url))
    traffic = argparse.Namespace(seconds=seconds, zipf=ZIPF, clients=CLIENTS)
    through.idle.clear()
    before = asyncio.run(counted(through))
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(_sample, servers, fleet.over)
        try:
            asking = threads.submit(asyncio.run, ask_all(through, fleet, traffic))
            disturb(seconds)
            seen, after = asking.result()
        finally:
            fleet.over.set()
    return figures_of(seen, difference(before, after), sampling.result())


def _sample(servers: Sequence[TritonServer], over: threading.Event) -> list[tuple[int, float]]:
    """Return how many models one Triton has and the MB that it takes, regularly."""
    samples = []
    while not over.wait(SAMPLE_S):
        for server in list(servers):
            sizes = [size_of(stub.pid) for stub in Stubs(server.process.pid).find()]
            samples.append((len(sizes), (size_of(server.process.pid) + sum(sizes)) / 1e6))
    return samples


def figures_of(seen: Seen, counts: dict[str, float], samples: Sequence[tuple[int, float]]) -> dict[str, Any]:
    times = sorted(seen.ms)
    cold = min(len(times), int(counts["cold_requests"]))
    return {
        "sent": len(times) + len(seen.failures),
        "failed": len(seen.failures),
        "wrong": len(seen.wrong),
        "errors": [*seen.failures[:5], *seen.wrong[:5]],
        "loads": int(counts["model_loads"]),
        "evictions": int(counts["model_evictions"]),
        "cold": cold,
        "loaded_ms": quantiles(times[: len(times) - cold]),
        "cold_ms": quantiles(times[len(times) - cold :]),
        "mean_load_s": round(counts["model_load_seconds_sum"] / max(1, counts["model_load_seconds_count"]), 2),
        "most_models": max(models for models, _ in samples),
        "most_mb": round(max(megabytes for _, megabytes in samples)),
    }

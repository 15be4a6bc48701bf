"""Thousands of models from one machine: `scripts/bench fleet serving`.

Copies of a tiny classifier and of one of MiniLM's size run on one embedded Triton whose gateway loads on demand, within
a budget of a tenth of what all of them together take. Clients choose models by Zipf's law; meanwhile models are rolled
back, and processes of models are killed. The labels of an answer tell which version of which model answered: an answer
of another model is wrong, and so is one of the old version to a request that began after a rollback.

A request is cold if it waited for a load: the slowest requests, as many as the loads that the gateway counted, or, with
a shared front, as many as the models that it loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from builder.checkpoints.libraries import quiet_libraries
from builder.common.samples import TEXTS
from builder.repository.sharing.hosting import MODELS
from builder.repository.sharing.share import share
from builder.repository.versions import served_number
from builder.serving.gateway.residency.memory import TritonProcesses
from builder.serving.gateway.server import allow_connections
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports, running
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.fleet_changing import Fleet
from scripts.benchmarks.fleet_copies import MINILM, TINY, VERSIONS, build_one, copy, host
from scripts.benchmarks.gateway import Through

TASK = "/v1/tasks/text-classification"
SHORT = TEXTS[:20]  # texts within the limit of the larger model
SHARED = "encoders"  # the shared front
HOSTED_SAMPLE = 41  # models of a shared front, to measure the memory of one
ONE_BY_ONE = 400  # requests of one client, to one model and to several
COUNTED = re.compile(r"^build_repo_gateway_(\w+?)(?:_total)? (\S+)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench fleet serving")
    parser.add_argument("--models", type=int, default=5000, help="tiny models (default 5000)")
    parser.add_argument("--large", type=int, default=50, help="models of MiniLM's size (default 50)")
    parser.add_argument("--clients", type=int, default=64, help="at once (default 64)")
    parser.add_argument("--seconds", type=float, default=120, help="of traffic (default 120)")
    parser.add_argument("--zipf", type=float, default=1.1, help="exponent of the law of popularity (default 1.1)")
    parser.add_argument("--budget-gb", type=float, help="default: a tenth of what all would take")
    parser.add_argument(
        "--shared", action="store_true", help="tiny models in one shared front, whose memory is a tenth of theirs"
    )
    parser.add_argument("--every", type=float, default=5, help="seconds from a rollback, or a kill, to the next")
    parser.add_argument("--repository", type=Path, help="keep the models here; made there where they are not")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args(arguments)
    allow_connections()
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        repository = options.repository or Path(folder) / "repository"
        names = make_fleet(repository, options.models, options.large, options.shared)
        figures = measure(repository, names, options)
    Console().print_json(json.dumps(figures))
    write_figures(options.output, {**circumstances(), "fleet": figures})
    assert not figures["failed"], figures["failures"]
    assert not figures["wrong"], figures["failures"]
    assert not figures["trouble"], figures["trouble"]
    assert figures["most_mb"] <= figures["budget_mb"], "more memory than the budget"


def make_fleet(repository: Path, tiny: int, large: int, shared: bool) -> list[str]:
    """Return the models of the fleet; create those that are missing."""
    wanted = {kind: shape for kind, count, shape in (("tiny", tiny, TINY), ("large", large, MINILM)) if count}
    names = {kind: [f"{kind}{index:04}" for index in range({"tiny": tiny, "large": large}[kind])] for kind in wanted}
    for kind, shape in wanted.items():
        folder = repository.parent / f"{repository.name}-{kind}"
        entry = folder / "one" if (folder / "one").exists() else build_one(folder, shape)
        if shared and kind == "tiny":
            host(entry, repository, SHARED, names[kind])
            continue
        for name in names[kind]:
            if not (repository / name).exists():
                copy(entry, repository, name)
    return [name for kind in wanted for name in names[kind]]


@dataclass
class Seen:
    """Outcome of the requests. `ms`: the time of each answered request."""

    ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def measure(repository: Path, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    with running(repository, on_demand=True) as server:
        sizes = asyncio.run(sizes_of(server, repository, names, options.shared))
    whole = {kind: sizes[kind] * sum(name.startswith(kind) for name in names) for kind in sizes}
    budget = options.budget_gb * 1e9 if options.budget_gb else sizes["server"] + sum(whole.values()) / 10
    if options.shared:
        memory = int(sizes["shared"] + whole["tiny"] / 10) >> 20
        share(repository, SHARED, (), memory)
        budget += 0 if options.budget_gb else sizes["shared"]
    port = free_ports().http
    with running(repository, on_demand=True) as server, on_demand(server, repository, port, budget):
        processes = TritonProcesses(server.url)
        assert processes.find(), "the server is on this machine"
        through = Through(port)
        figures: dict[str, Any] = {
            "models": len(names),
            "clients": options.clients,
            "one_takes_mb": {kind: round(size / 1e6, 2) for kind, size in sizes.items()},
            "all_would_take_mb": round(sum(whole.values()) / 1e6),
            "budget_mb": round(budget / 1e6),
        }
        figures["one_client_ms"] = asyncio.run(one_by_one(through, names))
        through.idle.clear()
        tiny = repository / SHARED / MODELS if options.shared else repository
        metrics = f"http://{server.host}:{server.ports.metrics}/metrics"
        hosts = {name: tiny if name.startswith("tiny") else repository for name in names}
        order = random.Random(2).sample(list(names), len(names))
        started = {name: (served_number(hosts[name] / name) or 0, 0.0) for name in names}
        return figures | traffic(through, Fleet(order, hosts, started, processes, metrics), options)


def on_demand(server: TritonServer, repository: Path, port: int, budget: float) -> AbstractContextManager[Any]:
    """Run a gateway that loads on demand."""
    more = ["--load-on-demand", "--repository", str(repository), "--memory-gb", str(budget / 1e9)]
    return gateway(server.url, "127.0.0.1", port, *more)


async def sizes_of(server: TritonServer, repository: Path, names: Sequence[str], shared: bool) -> dict[str, int]:
    """Return the bytes of the server, of a shared front without models, and of an answering model of each kind."""
    port, sizes, processes = free_ports().http, {}, TritonProcesses(server.url)
    processes.find()
    tiny, large = ([name for name in names if name.startswith(kind)] for kind in ("tiny", "large"))
    with on_demand(server, repository, port, 4e9):
        through = Through(port)
        for name in [*tiny[:HOSTED_SAMPLE], *large[:1]] if shared else [*tiny[:1], *large[:1]]:
            for text in SHORT[:10]:
                assert (await ask(through, name, text))[0] == 200
            usage = processes.usage()
            if shared and name in (tiny[0], tiny[HOSTED_SAMPLE - 1]):
                sizes[name] = usage.models[SHARED]
            elif name in usage.models:
                sizes[kind_of(name)] = usage.models[name]
        through.idle.clear()
    if shared:
        first, last = sizes.pop(tiny[0]), sizes.pop(tiny[HOSTED_SAMPLE - 1])
        sizes["tiny"] = (last - first) // (HOSTED_SAMPLE - 1)
        sizes["shared"] = first - sizes["tiny"]
    return {**sizes, "server": usage.server}


def kind_of(name: str) -> str:
    return name.rstrip("0123456789")


async def ask(through: Through, name: str, text: str) -> tuple[int, str]:
    """Return the status, and the label or the error."""
    body = json.dumps({"model": name, "inputs": text, "parameters": {"top_k": 1}}).encode()
    status, content = await through.post(TASK, body)
    return status, json.loads(content)[0][0]["label"] if status == 200 else content.decode()


async def one_by_one(through: Through, names: Sequence[str]) -> dict[str, Any]:
    """Return the milliseconds of one client that asks one model and then ten, by turns; all of them are loaded."""
    tiny = [name for name in names if name.startswith("tiny")][-10:]
    for name in tiny:
        assert (await ask(through, name, SHORT[0]))[0] == 200
    times: dict[str, list[float]] = {"one model": [], "ten models": []}
    for turn in range(ONE_BY_ONE):
        for kind, name in (("one model", tiny[0]), ("ten models", tiny[turn % len(tiny)])):
            started = time.perf_counter()
            assert (await ask(through, name, SHORT[turn % 10]))[0] == 200
            times[kind].append(1000 * (time.perf_counter() - started))
    return {kind: quantiles(values) for kind, values in times.items()}


def traffic(through: Through, fleet: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    threads = [
        threading.Thread(target=fleet.sample),
        threading.Thread(target=fleet.disturb, args=(options.every, random.Random(1))),
    ]
    for thread in threads:
        thread.start()
    before = asyncio.run(counted(through))
    through.idle.clear()
    try:
        seen, after = asyncio.run(ask_all(through, fleet, options))
    finally:
        fleet.over.set()
        for thread in threads:
            thread.join()
    return figures_of(fleet, seen, difference(before, after), options)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each of the gateway's metrics grew."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


async def ask_all(through: Through, fleet: Fleet, options: argparse.Namespace) -> tuple[Seen, dict[str, float]]:
    seen, end = Seen(), time.monotonic() + options.seconds
    weights = np.cumsum(1 / np.arange(1, len(fleet.order) + 1) ** options.zipf)

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < end:
            name = fleet.order[int(np.searchsorted(weights, dice.random() * weights[-1]))]
            await one(through, fleet, name, dice.choice(SHORT), seen)

    await asyncio.gather(*(client(number) for number in range(options.clients)))
    return seen, await counted(through)


async def one(through: Through, fleet: Fleet, name: str, text: str, seen: Seen) -> None:
    before, started = fleet.served[name], time.monotonic()
    try:
        status, says = await ask(through, name, text)
    except Exception as error:
        seen.failures.append(f"{name}: {error!r}")
        return
    if status != 200:
        seen.failures.append(f"{name}: {status} {says[:300]}")
        return
    seen.ms.append(1000 * (time.monotonic() - started))
    right = {before[0]} if fleet.served[name] == before and started > before[1] else set(VERSIONS)
    if not any(says.startswith(f"{name}/{number}/") for number in right):
        seen.wrong.append(f"{name}, of which {right} answers, said {says}")


async def counted(through: Through) -> dict[str, float]:
    """Return the gateway's own counters."""
    reader, writer = await asyncio.open_connection("127.0.0.1", through.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return {name: float(value) for name, value in COUNTED.findall(text)}


def figures_of(fleet: Fleet, seen: Seen, counts: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    times = sorted(seen.ms)
    cold = min(len(times), int(counts.get("cold_requests", 0)) + fleet.hosted_loads)
    shared, held, models = zip(*fleet.sampled, strict=True)
    return {
        "seconds": options.seconds,
        "requests": len(times),
        "failed": len(seen.failures),
        "wrong": len(seen.wrong),
        "failures": [*seen.failures[:5], *seen.wrong[:5]],
        "trouble": fleet.trouble,
        "requests_per_s": round(len(times) / options.seconds, 1),
        "cold_share": round(cold / max(1, len(times)), 4),
        "hit_ms": quantiles(times[: len(times) - cold]),
        "cold_ms": quantiles(times[len(times) - cold :]),
        "loads": int(counts["model_loads"]),
        "loads_of_the_shared_front": fleet.hosted_loads,
        "evictions": int(counts["model_evictions"]),
        "deaths": int(counts["model_deaths"]),
        "mean_load_s": round(counts["model_load_seconds_sum"] / max(1, counts["model_load_seconds_count"]), 2),
        "rollbacks": fleet.rollbacks,
        "kills": fleet.kills,
        "most_models": max(models),
        "most_mb": round(max(shared)),
        "mean_mb": round(float(np.mean(shared))),
        "most_rss_mb": round(max(held)),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: round(float(np.quantile(values, share)), 1) if len(values) else 0.0 for name, share in shares.items()}

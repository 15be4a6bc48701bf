"""Run gateways over simulated Tritons, and report how they shared the work and what failures cost.

The gateway's own `FleetMembers`, `FleetServer` and `FleetBackend` run unchanged, each gateway with its own. Servers,
clients and time are simulated.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.fleet.backend import FleetBackend
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.on_demand import OnDemandFleetBackend
from scripts.simulation import clock
from scripts.simulation.counters import total_of
from scripts.simulation.on_demand import loading_figures, on_demand_backend
from scripts.simulation.servers import SLOTS, SimulatedTriton, Stopwatch
from scripts.simulation.traffic import Call, Traffic

FAILURES = ("crashed", "cut off", "slow")
SLOWNESS = 10.0  # factor of a slow server's times
Failing = Mapping[str, Sequence[SimulatedTriton]]  # by kind of failure


@dataclass(frozen=True)
class Scenario:
    """A fleet and its traffic. `load`: share of all slots that requests keep busy, without a cache.

    `memory`: models that each server has memory for, loaded on demand; 0: they are placed before the start. `failures`:
    servers that crash, as many that are cut off, and as many that become slow, in the middle third of
    `seconds`.
    """

    servers: int = 1000
    models: int = 50_000
    gateways: int = 4
    seconds: float = 60.0
    memory: int = 0
    load: float = 0.6
    zipf: float = 1.0
    failures: int = 10
    seed: int = 0


@dataclass
class Outcome:
    """Results of the requests. `first_s`, `encoded_s`: until a decoder's first piece, and an encoder's answer.

    `failed`: without an answer, `unserved` of these because no server that had the model was in service.
    """

    sent: int = 0
    first_s: list[float] = field(default_factory=list)
    encoded_s: list[float] = field(default_factory=list)
    failed: int = 0
    unserved: int = 0
    cut_streams: int = 0
    beginnings: set[str] = field(default_factory=set)
    repeated: int = 0


def simulate(scenario: Scenario) -> dict[str, Any]:
    """Return the figures of a scenario. All but `measured` are the same each time."""
    return clock.run(_simulate(scenario))


async def _simulate(scenario: Scenario) -> dict[str, Any]:
    random, stopwatch, loop = Random(scenario.seed), Stopwatch(), asyncio.get_running_loop()
    traffic = Traffic(scenario.models, scenario.zipf, random)
    tritons = [
        SimulatedTriton(f"10.0.{number >> 8}.{number & 255}:8001", models, stopwatch, bool(scenario.memory))
        for number, models in enumerate([[]] * scenario.servers if scenario.memory else traffic.place(scenario.servers))
    ]
    chosen = random.sample(tritons, len(FAILURES) * scenario.failures)
    failing = {kind: chosen[number :: len(FAILURES)] for number, kind in enumerate(FAILURES)}
    backends = [_backend(tritons, scenario.memory, Random(number)) for number in range(scenario.gateways)]
    members = [backend.members for backend in backends]
    await asyncio.gather(*(each.check() for each in members))
    outcome = Outcome()
    background = [asyncio.ensure_future(each.watch()) for each in members]
    on_demand = [backend for backend in backends if isinstance(backend, OnDemandFleetBackend)]
    background += [asyncio.ensure_future(backend.watch()) for backend in on_demand]
    loop.call_at(scenario.seconds / 3, _fail, failing)
    loop.call_at(scenario.seconds * 2 / 3, _restore, failing)
    interval_s = traffic.mean_slot_seconds() / (scenario.load * scenario.servers * SLOTS)
    async with asyncio.TaskGroup() as clients:
        while loop.time() < scenario.seconds:
            await asyncio.sleep(random.expovariate(1 / interval_s))
            clients.create_task(_ask(random.choice(backends), traffic.next_call(), tritons, stopwatch, outcome))
    for task in background:
        task.cancel()
    figures = _figures(scenario, tritons, failing, outcome, members) | _measured(stopwatch)
    return figures | ({"loading": loading_figures(on_demand, outcome.sent)} if on_demand else {})


def _backend(tritons: Sequence[SimulatedTriton], memory: int, random: Random) -> FleetBackend:
    """Return a gateway, with what it knows of the servers."""
    return on_demand_backend(tritons, memory, random) if memory else FleetBackend(_members(tritons), random)


def _members(tritons: Sequence[SimulatedTriton]) -> FleetMembers:
    """Return the servers as one gateway knows them."""
    now = asyncio.get_running_loop().time
    members = FleetMembers([triton.url for triton in tritons], FleetMetrics(CollectorRegistry()), now)
    members.servers = {triton.url: FleetServer(triton.url, triton, members.holders) for triton in tritons}
    return members


async def _ask(
    backend: FleetBackend, call: Call, tritons: Sequence[SimulatedTriton], stopwatch: Stopwatch, outcome: Outcome
) -> None:
    """Send a request as a client does, and wait for all of its answer."""
    loop, has_started = asyncio.get_running_loop(), False
    started, outcome.sent = loop.time(), outcome.sent + 1
    stopwatch.start()
    try:
        if not call.beginning:
            await backend.infer(call.request)
            outcome.encoded_s.append(loop.time() - started)
            return
        outcome.repeated += call.beginning in outcome.beginnings
        outcome.beginnings.add(call.beginning)
        async for _ in backend.stream(call.request):
            if not has_started:
                outcome.first_s.append(loop.time() - started)
            has_started = True
    except ApiError:
        outcome.cut_streams += has_started
        if not has_started:
            outcome.failed += 1
            outcome.unserved += not any(triton.serves(call.request.model_name) for triton in tritons)


def _fail(failing: Failing) -> None:
    for crashed, cut_off, slow in zip(*failing.values(), strict=True):
        crashed.crash()
        cut_off.connected.clear()
        slow.slowness = SLOWNESS


def _restore(failing: Failing) -> None:
    for crashed, cut_off, slow in zip(*failing.values(), strict=True):
        crashed.is_up = True
        cut_off.connected.set()
        slow.slowness = 1.0


def _figures(
    scenario: Scenario,
    tritons: Sequence[SimulatedTriton],
    failing: Failing,
    outcome: Outcome,
    members: Sequence[FleetMembers],
) -> dict[str, Any]:
    metrics = [each.metrics for each in members]
    failures = {triton for tritons in failing.values() for triton in tritons}
    busy_s = [triton.busy_s for triton in tritons if triton not in failures]
    return {
        "requests": outcome.sent,
        "failed": outcome.failed,
        "unserved": outcome.unserved,
        "cut_streams": outcome.cut_streams,
        "retried": total_of(metrics, "retries"),
        "refused_retries": total_of(metrics, "refused_retries"),
        "ejections": total_of(metrics, "ejections"),
        "busy_p99_over_mean": round(_quantile(busy_s, 0.99) / mean(busy_s), 2),
        "prefix_hit_rate": round(sum(triton.hits for triton in tritons) / max(1, outcome.repeated), 3),
        "first_piece_s": _quantiles(outcome.first_s),
        "embedding_s": _quantiles(outcome.encoded_s),
        "failures": {kind: recovery(of, scenario) for kind, of in failing.items() if of},
    }


def recovery(tritons: Sequence[SimulatedTriton], scenario: Scenario) -> dict[str, float | None]:
    """Return how traffic to servers that failed in the middle third of the time ended and came back.

    `avoided_after_s`: from the failure to the last request before the return. `back_after_s`: from the return to the
    first request; None if a server got no request again. Both of the slowest server. `share`: of the requests of the
    same servers in the first third; `median_share`: that of the median server.
    """
    start, end = scenario.seconds / 3, scenario.seconds * 2 / 3
    before = [sum(at < start for at in triton.asked) for triton in tritons]
    during = [[at for at in triton.asked if start <= at < end] for triton in tritons]
    after = [next((at for at in triton.asked if at >= end), math.inf) for triton in tritons]
    shares = [len(asked) / max(1, count) for asked, count in zip(during, before, strict=True)]
    return {
        "requests": sum(map(len, during)),
        "share": round(sum(map(len, during)) / max(1, sum(before)), 3),
        "median_share": round(median(shares), 3),
        "avoided_after_s": round(max(asked[-1] - start if asked else 0.0 for asked in during), 2),
        "back_after_s": None if math.inf in after else round(max(after) - end, 2),
    }


def _measured(stopwatch: Stopwatch) -> dict[str, Any]:
    spent = stopwatch.decisions
    measured = {"decisions_per_s": round(len(spent) / sum(spent)), "decision_us": _quantiles(spent, 1e6)}
    return {"measured": measured}


def _quantiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(scale * _quantile(values, share), 3) for name, share in shares.items()}


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))

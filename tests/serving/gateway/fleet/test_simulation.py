"""Routing at scale, on the simulated clock of `scripts/simulate`; and a request's cost in a large fleet."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tritonclient.grpc import service_pb2

from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.on_demand import FIRST_SERVERS
from builder.serving.gateway.fleet.placement import candidates_for
from scripts.simulation import clock
from scripts.simulation.fleet import Scenario, recovery, simulate
from scripts.simulation.on_demand import on_demand_backend
from scripts.simulation.servers import SimulatedTriton, Stopwatch

SMALL = Scenario(servers=12, models=40, gateways=2, seconds=30.0, load=0.4, failures=1)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return simulate(SMALL)


def test_simulated_failures_lose_only_streams_that_had_started(figures: dict[str, Any]) -> None:
    assert figures["requests"] > 500
    assert figures["failed"] == figures["refused_retries"] == 0
    assert 0 < figures["cut_streams"] <= 8, "at most the slots of the server that crashed"
    assert figures["retried"] > 0


def test_simulated_traffic_avoids_a_dead_server_and_returns(figures: dict[str, Any]) -> None:
    crashed, cut_off, slow = (figures["failures"][kind] for kind in ("crashed", "cut off", "slow"))
    assert crashed["share"] < cut_off["share"] < 0.8
    assert slow["share"] < 0.8
    assert cut_off["avoided_after_s"] < 10, "three checks of two seconds, and the pauses between them"
    assert max(kind["back_after_s"] for kind in (crashed, cut_off)) < 5


def test_simulated_prompts_that_begin_alike_meet(figures: dict[str, Any]) -> None:
    assert figures["prefix_hit_rate"] > 0.8


def test_simulation_repeats_itself(figures: dict[str, Any]) -> None:
    again = simulate(SMALL)
    assert {**again, "measured": None} == {**figures, "measured": None}


def test_request_looks_only_at_servers_that_have_its_model() -> None:
    """Regression: a decision looked at every server of the fleet."""
    looked: list[str] = []

    class Counting(FleetServer):
        @property
        def accepts_requests(self) -> bool:
            looked.append(self.name)
            return True

    async def scenario() -> None:
        members = FleetMembers([], FleetMetrics(CollectorRegistry()))
        for number in range(100):
            triton = SimulatedTriton(str(number), ["common", *["rare"] * (number < 2)], Stopwatch())
            members.servers[triton.url] = Counting(triton.url, triton, members.holders)
        await members.read(FleetServer.read_versions)
        looked.clear()
        assert {server.name for server in members.accepting_with("rare")} == {"0", "1"}
        assert len(looked) == 2

    clock.run(scenario())


def test_simulated_fleet_loads_models_on_demand() -> None:
    """Memory for 48 copies of 40 models: a crash, a cut and a slow server fail no request, and few models move."""
    figures = simulate(replace(SMALL, memory=4))
    assert figures["failed"] == figures["refused_retries"] == 0
    assert figures["loading"]["hit_rate"] > 0.7
    assert figures["loading"]["evictions"] < 40
    assert figures["prefix_hit_rate"] > 0.8


def test_request_for_a_loading_model_looks_at_few_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a request that waited for a load, or started one again, looked at every server of the fleet."""
    looked: list[str] = []
    accepts_requests = FleetServer.accepts_requests

    def look(server: FleetServer) -> bool:
        looked.append(server.name)
        return bool(accepts_requests.fget(server))  # type: ignore[attr-defined]

    async def scenario() -> None:
        tritons = [SimulatedTriton(str(number), [], Stopwatch(), is_explicit=True) for number in range(100)]
        backend = on_demand_backend(tritons, memory=4, random=Random(0))
        await backend.members.check()
        requests = [backend.infer(service_pb2.ModelInferRequest(model_name="rare")) for _ in range(10)]
        monkeypatch.setattr(FleetServer, "accepts_requests", property(look))
        await asyncio.gather(*requests)
        assert 0 < len(looked) <= 10 * FIRST_SERVERS
        assert sum(bool(triton.asked) for triton in tritons) == 1, "all requests wait for one load"

    clock.run(scenario())


def test_server_that_joins_loads_the_models_that_prefer_it() -> None:
    """A remembered order of servers is dropped once there are new ones."""

    async def scenario() -> None:
        tritons = [SimulatedTriton(str(number), [], Stopwatch(), is_explicit=True) for number in range(11)]
        (favourite,) = candidates_for("rare", [SimpleNamespace(name=triton.url) for triton in tritons], count=1)
        new = tritons.pop(int(favourite.name))
        backend = on_demand_backend(tritons, memory=4, random=Random(0))
        await backend.members.check()
        await backend.infer(service_pb2.ModelInferRequest(model_name="rare"))
        (first,) = (triton for triton in tritons if triton.asked)
        joining = on_demand_backend([new], memory=4, random=Random(0)).members.servers[new.url]
        members = backend.members
        members.targets, members.connect = [*members.targets, new.url], lambda address, holders: joining
        await members.update()
        first.crash()
        await backend.infer(service_pb2.ModelInferRequest(model_name="rare"))
        assert new.asked

    clock.run(scenario())


def test_recovery_tells_a_server_that_got_no_request_again() -> None:
    """Regression: the figures had Infinity then, which JSON does not know."""
    back, away = (SimulatedTriton(str(number), [], Stopwatch()) for number in range(2))
    back.asked, away.asked = [1.0, 11.0, 23.5], [1.0]
    assert recovery([back], SMALL)["back_after_s"] == 3.5
    both = recovery([back, away], SMALL)
    assert both["back_after_s"] is None
    assert both["share"] == both["median_share"] == 0.5


def test_server_that_was_cut_off_is_not_slow_afterwards() -> None:
    """Its late answers say how long the network was away. One that missed a check stays slow."""

    async def scenario() -> None:
        members = FleetMembers([], FleetMetrics(CollectorRegistry()))
        server = FleetServer("a", SimulatedTriton("a", ["common"], Stopwatch()), members.holders)
        earlier = server.slowness_meter
        await server.check()
        earlier.record(1e6)
        assert server.slowness == 1.0, "it was not ready before"
        server.slowness_meter.record(1e6)
        server.missed_checks = 1
        await server.check()
        assert server.slowness > 2.0

    clock.run(scenario())

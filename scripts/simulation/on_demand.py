"""Models on demand over simulated Tritons: the gateway's own placement, memory budgets and loader run unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.on_demand import OnDemandFleetBackend
from builder.serving.gateway.fleet.on_demand_server import OnDemandServer
from builder.serving.gateway.metrics import LoadingMetrics
from builder.serving.gateway.residency.backend import OnDemandBackend
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.memory import MemoryEstimate, TritonProcesses
from builder.serving.gateway.residency.memory_budget import SERVER_BYTES
from builder.serving.gateway.residency.repository_models import ConfiguredModel, RepositoryModels, Stamp
from builder.serving.gateway.residency.resident_models import ResidentModels
from scripts.simulation.counters import total_of
from scripts.simulation.servers import SimulatedTriton

MODEL_BYTES = 100 << 20
STAMP = (0, 0, 0)


class SimulatedModels(RepositoryModels):
    """A repository that has every model, in one version."""

    def stamp(self, name: str) -> Stamp:
        return STAMP

    def configured(self, name: str) -> ConfiguredModel:
        return ConfiguredModel(STAMP, cast(Any, SimpleNamespace(version="1")))


class SimulatedLoader(TritonLoader):
    """Loader of models that all take as much memory."""

    async def estimate(self, name: str, version: str) -> MemoryEstimate:
        return MemoryEstimate(MODEL_BYTES)


class RemoteProcesses(TritonProcesses):
    """Processes of another machine, which cannot be seen."""

    def find(self) -> bool:
        return False


def on_demand_backend(tritons: Sequence[SimulatedTriton], memory: int, random: Random) -> OnDemandFleetBackend:
    """Return a gateway over `tritons`, each with memory for `memory` models."""
    now = asyncio.get_running_loop().time
    registry, models = CollectorRegistry(), SimulatedModels(Path())
    members, metrics = FleetMembers([t.url for t in tritons], FleetMetrics(registry), now), LoadingMetrics(registry)
    for triton in tritons:
        processes = RemoteProcesses(triton.url)
        loader = SimulatedLoader(triton, models, triton.url, processes)
        residents = ResidentModels(models, loader, metrics, SERVER_BYTES + memory * MODEL_BYTES, now=now)
        backend = OnDemandBackend(triton, residents, processes)
        members.servers[triton.url] = OnDemandServer(triton.url, triton, members.holders, backend)
    return OnDemandFleetBackend(members, models, random)


def loading_figures(backends: Sequence[OnDemandFleetBackend], requests: int) -> dict[str, Any]:
    """Return how often models were loaded and evicted, and the share of requests that waited for no load."""
    metrics = [_metrics(backend) for backend in backends]
    total = {name: total_of(metrics, name) for name in ("loads", "evictions", "waits", "deaths")}
    waits = total.pop("waits")
    return {**total, "hit_rate": round(1 - waits / max(1, requests), 4)}


def _metrics(backend: OnDemandFleetBackend) -> LoadingMetrics:
    server = next(iter(backend.members.servers.values()))
    assert isinstance(server, OnDemandServer)
    return server.residents.metrics

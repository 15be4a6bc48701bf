"""A gateway that loads models on demand over several stand-ins for Triton, each with memory for a few models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from builder.repository.config.render import CONFIG, parse
from builder.serving.gateway.app import make_app
from builder.serving.gateway.errors import ServerUnreachable
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.holders import ModelHolders
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.on_demand import OnDemandFleetBackend
from builder.serving.gateway.fleet.on_demand_server import OnDemandServer
from builder.serving.gateway.metrics import LoadingMetrics, Metrics
from builder.serving.gateway.residency.backend import on_demand_backend
from builder.serving.gateway.residency.memory_budget import SERVER_BYTES
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.settings import GatewaySettings, OnDemandSettings
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_control import FakeServer
from tests.serving.gateway.on_demand import NOWHERE, ONE


class FleetFakeServer(FakeServer):
    """A FakeServer that a fleet checks, and that can be dead."""

    is_up = True

    async def reports_ready(self) -> bool:
        return False  # as Triton says while it loads a model

    async def reports_live(self) -> bool:
        self._require_up()
        return True

    async def close(self, grace_s: float = 0.0) -> None:
        return None

    async def config(self, name: str, version: str) -> Any:
        return parse((self.repository / name / CONFIG).read_text("utf-8"), name)

    async def index(self) -> list[tuple[str, str]]:
        self._require_up()
        return await super().index()

    async def load(self, name: str) -> None:
        self._require_up()
        await super().load(name)

    async def infer(self, request, metadata=()):  # type: ignore[no-untyped-def]
        self._require_up()
        return await super().infer(request, metadata)

    def _require_up(self) -> None:
        if not self.is_up:
            raise ServerUnreachable("Triton does not answer: Connection refused")


class OnDemandFleet:
    """A gateway over stand-ins by address, each with memory for `room` models. Several share `tritons`."""

    def __init__(
        self,
        repository: Path,
        addresses: list[str],
        room: float = 2,
        tritons: dict[str, FleetFakeServer] | None = None,
        pins: tuple[str, ...] = (),
    ) -> None:
        self.now = 0.0
        self.tritons = tritons or {address: FleetFakeServer(repository) for address in addresses}
        metrics, models = Metrics(), RepositoryModels(repository)
        options = OnDemandSettings(repository, SERVER_BYTES + int(room * ONE), pins)
        loading = LoadingMetrics(metrics.registry)

        def connect(address: str, holders: ModelHolders[FleetServer]) -> OnDemandServer:
            triton = self.tritons[address]
            backend = on_demand_backend(triton, NOWHERE, models, options, loading, 256, has_copy=True)
            backend.residents.budget.now = lambda: self.now
            return OnDemandServer(address, triton, holders, backend)  # type: ignore[arg-type]  # a stand-in

        self.members = FleetMembers(addresses, FleetMetrics(metrics.registry), lambda: self.now, connect)
        self.backend = OnDemandFleetBackend(self.members, models, Random(0))
        self.app = make_app(GatewaySettings(), self.backend, None, models=models, metrics=metrics)

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        async with asyncio.timeout(60):
            await self.members.update()
            yield
            await self.members.close()

    async def embed(self, name: str, text: str = "text") -> Answer:
        """Ask a model a second after the request before."""
        self.now += 1.0
        return await ask(self.app, "/v1/embeddings", {"model": name, "input": text})

    def loaded(self, name: str) -> int:
        """Return how many servers have a model loaded, as the gateway knows."""
        servers = self.members.servers.values()
        return sum(isinstance(server, OnDemandServer) and server.has_loaded(name) for server in servers)

    def servers_with(self, name: str) -> list[str]:
        """Return the addresses of the stand-ins that have a model loaded."""
        return [address for address, triton in self.tritons.items() if name in triton.loaded]

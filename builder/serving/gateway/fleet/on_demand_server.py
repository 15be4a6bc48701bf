"""Load models on demand on one Triton of a fleet, within a memory budget of its own."""

from __future__ import annotations

from builder.serving.gateway.background import start_task
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.holders import ModelHolders
from builder.serving.gateway.fleet.members import Connect
from builder.serving.gateway.fleet.placement import COPY_IDLE_S
from builder.serving.gateway.metrics import LoadingMetrics
from builder.serving.gateway.residency.backend import OnDemandBackend, on_demand_backend
from builder.serving.gateway.residency.repository_models import RepositoryModels, Stamp
from builder.serving.gateway.residency.resident_model import State
from builder.serving.gateway.settings import OnDemandSettings
from builder.serving.gateway.triton import Triton


class OnDemandServer(FleetServer):
    """Triton whose models are loaded for requests. A loaded or loading model is where its requests go."""

    def __init__(self, name: str, triton: Triton, holders: ModelHolders[FleetServer], backend: OnDemandBackend) -> None:
        super().__init__(name, triton, holders, backend)
        self.residents = backend.residents
        self.watching = start_task(backend.watch())

    @property
    def has_drained(self) -> bool:
        """Return True if it left, has no requests, and others have had the time to load what it is asked for."""
        budget = self.residents.budget
        own = [resident for resident in budget.models.values() if resident.name not in budget.pins]
        is_idle = all(budget.now() - resident.requested_at >= COPY_IDLE_S for resident in own)
        return super().has_drained and (is_idle or not self.is_ready)

    async def reports_ready(self) -> bool:
        """Return True if the server runs: Triton is not ready while it loads a model (--strict-readiness)."""
        return await self.triton.reports_live()

    async def close(self, grace_s: float = 0.0) -> None:
        self.watching.cancel()
        self.residents.metrics.residencies.remove(self.residents)
        await super().close(grace_s)

    def has_loaded(self, model: str) -> bool:
        """Return True if a model is loaded, also by another gateway.

        `versions` say nothing of a server that leaves: it is not asked for them any more.
        """
        resident = self.residents.models.get(model)
        if resident is not None:
            return resident.state is State.READY
        is_listed = model in self.versions and not self.is_leaving
        return is_listed and not any(other.name == model for other in self.residents.budget.unloading)

    def has_loaded_as(self, model: str, stamp: Stamp | None) -> bool:
        """Return True if a model is loaded with the configuration of `stamp`."""
        resident = self.residents.models.get(model)
        return resident is not None and resident.state is State.READY and resident.stamp == stamp

    def is_loading(self, model: str) -> bool:
        resident = self.residents.models.get(model)
        return resident is not None and resident.state is State.LOADING

    def idle_s(self, size: int) -> float:
        """Return how long the models were idle that a load of `size` bytes would evict, in seconds."""
        return self.residents.budget.idle_s(size)


def on_demand_servers(
    models: RepositoryModels, options: OnDemandSettings, metrics: LoadingMetrics, max_waiting: int
) -> Connect:
    """Return how to connect to a Triton that may use `options.memory` bytes, and loads `models` on demand."""

    def connect(address: str, holders: ModelHolders[FleetServer]) -> OnDemandServer:
        triton = Triton(address)
        backend = on_demand_backend(triton, address, models, options, metrics, max_waiting, has_copy=True)
        return OnDemandServer(address, triton, holders, backend)

    return connect

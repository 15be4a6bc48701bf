"""Keep leases on the loaded models, and react to their deaths and measurements.

Everything runs on one event loop and needs no lock: a request that finds its model loaded takes a lease without
waiting. Other requests wait for the load of their model, which they share. Loads get memory in order of arrival; the
least recently requested models are unloaded for them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from builder.serving.gateway.errors import ApiError, queue_full
from builder.serving.gateway.residency.lifecycle import Lifecycle
from builder.serving.gateway.residency.resident_model import PROCESS_DIED, ResidentModel, State

UNLOADED = "Request for unknown model: "  # another client has unloaded it; running requests are still answered


class ResidentModels:
    """Models loaded by `lifecycle`; `max_waiting`: maximum number of requests that wait for one."""

    def __init__(self, lifecycle: Lifecycle, max_waiting: int = 256) -> None:
        self.lifecycle, self.max_waiting = lifecycle, max_waiting
        self.repository_models, self.metrics = lifecycle.repository_models, lifecycle.metrics
        self.budget, self.backoff = lifecycle.budget, lifecycle.backoff
        self.models = self.budget.models

    async def lease(self, name: str) -> ResidentModel:
        """Return a model that is loaded and stays so until `release`. Raises ApiError."""
        while True:
            stamp, resident = self.repository_models.stamp(name), self.models.get(name)
            if (
                resident is not None
                and resident.state is State.READY
                # a newer configuration that failed to load has to wait
                and (resident.stamp == stamp or (stamp is not None and self.backoff.is_waiting(name, stamp)))
            ):
                resident.leases += 1
                self.models.move_to_end(name)
                return resident
            if resident is None or resident.state is State.READY or resident.stamp == stamp:
                return await self._wait_loaded(name, resident)
            if resident.task is not None:  # it loads an outdated configuration
                await asyncio.wait({resident.task})

    def release(self, resident: ResidentModel) -> None:
        """End a lease after its request is answered."""
        resident.leases -= 1
        if not resident.leases and self.budget.pending:
            self.budget.rebalance()

    def handle_death(self, resident: ResidentModel, reason: str) -> None:
        """Unload a model that stopped answering; its next request loads it again."""
        if self.models.get(resident.name) is not resident or resident.state is not State.READY:
            return
        if UNLOADED not in reason:
            resident.end_calls()
        self.metrics.deaths.inc()
        if resident.stamp is not None:
            self.backoff.record_death(resident.name, resident.stamp, reason, self.budget.now() - resident.since)
        self.lifecycle.unload(resident)

    def handle_dead_process(self, name: str, process: int) -> None:
        """Handle a dead process of a model."""
        resident = self.models.get(name)
        if resident is not None and process not in resident.earlier:
            resident.end_calls()
            self.handle_death(resident, PROCESS_DIED)

    async def adopt(self, name: str, version: str) -> None:
        """Add a model that another client has loaded. Its estimate counts until it is measured."""
        if self._is_known(name):
            return
        with suppress(ApiError):
            configured = self.repository_models.configured(name)
            if configured.model is None:
                return
            estimate = await self.lifecycle.loader.estimate(name, version)
            if self._is_known(name):  # requested meanwhile
                return
            stamp = configured.stamp if configured.model.version == version else None
            resident = ResidentModel(name, stamp, version, State.READY, estimate.size, estimate.reserved)
            resident.engines, resident.since = estimate.engines, self.budget.now()
            self.models[name] = resident
            self.models.move_to_end(name, last=False)

    def _is_known(self, name: str) -> bool:
        return name in self.models or any(other.name == name for other in self.budget.unloading)

    def remove_unloaded(self, name: str, before: float) -> None:
        """Remove a model that was found unloaded by a check that started at `before`."""
        resident = self.models.get(name)
        if resident is not None and resident.state is State.READY and resident.since < before:
            del self.models[name]

    def record_usage(self, server: int, models: dict[str, int]) -> None:
        """Record the current memory of the server and its models, and evict models if it is too much."""
        residents = (*self.models.values(), *self.budget.unloading)
        resident_names = {model for resident in residents for model in (resident.name, *resident.engines)}
        self.budget.server = server + sum(size for model, size in models.items() if model not in resident_names)
        for resident in self.models.values():
            size = sum(models.get(model, 0) for model in (resident.name, *resident.engines))
            if resident.state is State.READY and size:
                self.lifecycle.record_size(resident, size)
        self.budget.rebalance()
        self.lifecycle.update_metrics()

    async def _wait_loaded(self, name: str, resident: ResidentModel | None) -> ResidentModel:
        """Wait for a load. It continues if a waiting request is cancelled."""
        if resident is None or resident.state is not State.LOADING:
            resident = self.lifecycle.start_loading(name, resident)
        if resident.waiting >= self.max_waiting:
            raise queue_full(f"{resident.waiting} requests wait for {name} to be loaded", 2)
        assert resident.task is not None
        resident.waiting += 1
        resident.leases += 1
        self.metrics.waits.inc()
        try:
            await asyncio.shield(resident.task)
        except BaseException as error:
            self.release(resident)
            previous = self.models.get(name)
            if previous is None or previous.state is not State.READY or not isinstance(error, ApiError):
                raise
            previous.leases += 1  # a version that fails to load does not replace the one that answers
            return previous
        finally:
            resident.waiting -= 1
        return resident

"""The loaded models: leases on them, and reactions to their deaths and measurements.

Everything runs on one event loop and needs no lock: a request that finds its model loaded takes a lease without
waiting. Other requests wait for the load of their model, which they share. Loads wait for memory in their order; the
models that were not requested for the longest time are unloaded for them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.lifecycle import Lifecycle
from builder.serving.gateway.residency.offered import Stamp
from builder.serving.gateway.residency.resident import ENDED, Resident, State

UNLOADED = "Request for unknown model: "  # another client has unloaded it; running requests are still answered


class Residents:
    """Models loaded by `lifecycle`; `most_waiting`: requests that may wait for one of them."""

    def __init__(self, lifecycle: Lifecycle, most_waiting: int = 256) -> None:
        self.lifecycle, self.most_waiting = lifecycle, most_waiting
        self.offered, self.measures = lifecycle.offered, lifecycle.measures
        self.room, self.backoff = lifecycle.room, lifecycle.backoff
        self.models = self.room.models

    async def lease(self, name: str) -> Resident:
        """Return a model that is loaded and stays so until `release`. Raises ApiError."""
        while True:
            stamp, resident = self.offered.stamp(name), self.models.get(name)
            if resident is not None and resident.state is State.READY and self._fits(resident, stamp):
                resident.leases += 1
                self.models.move_to_end(name)
                return resident
            if resident is None or resident.state is State.READY or resident.stamp == stamp:
                return await self._wait(name, resident)
            if resident.task is not None:  # it loads an outdated configuration
                await asyncio.wait({resident.task})

    def release(self, resident: Resident) -> None:
        """End a lease after its request is answered."""
        resident.leases -= 1
        if not resident.leases and self.room.seekers:
            self.room.make()

    def died(self, resident: Resident, reason: str) -> None:
        """Unload a model that stopped answering; its next request loads it again."""
        if self.models.get(resident.name) is not resident or resident.state is not State.READY:
            return
        if UNLOADED not in reason:
            resident.break_off()
        self.measures.deaths.inc()
        if resident.stamp is not None:
            self.backoff.note_death(resident.name, resident.stamp, reason, self.room.now() - resident.since)
        self.lifecycle.leave(resident)

    def ended(self, name: str, process: int) -> None:
        """Handle a dead process of a model."""
        resident = self.models.get(name)
        if resident is not None and process not in resident.earlier:
            resident.break_off()
            self.died(resident, ENDED)

    async def adopt(self, name: str, version: str) -> None:
        """Add a model that another client has loaded. Its estimate counts until it is measured."""
        if self._is_known(name):
            return
        with suppress(ApiError):
            offer = self.offered.offer(name)
            if offer.model is None:
                return
            needs = await self.lifecycle.loading.needs(name, version)
            if self._is_known(name):  # requested meanwhile
                return
            stamp = offer.stamp if offer.model.version == version else None
            resident = Resident(name, stamp, version, State.READY, needs.size, needs.reserved, needs.engines)
            resident.since = self.room.now()
            self.models[name] = resident
            self.models.move_to_end(name, last=False)

    def _is_known(self, name: str) -> bool:
        return name in self.models or any(other.name == name for other in self.room.leaving)

    def lost(self, name: str, before: float) -> None:
        """Remove a model that was found unloaded by a check that began at `before`."""
        resident = self.models.get(name)
        if resident is not None and resident.state is State.READY and resident.since < before:
            del self.models[name]

    def measured(self, server: int, models: dict[str, int]) -> None:
        """Record the current memory of the server and its models, and evict models if it is too much."""
        held = {model: r for r in (*self.models.values(), *self.room.leaving) for model in (r.name, *r.engines)}
        self.room.server = server + sum(size for model, size in models.items() if model not in held)
        for resident in self.models.values():
            size = sum(models.get(model, 0) for model in (resident.name, *resident.engines))
            if resident.state is State.READY and size:
                self.lifecycle.weigh(resident, size)
        self.room.make()
        self.lifecycle.count()

    def _fits(self, resident: Resident, stamp: Stamp | None) -> bool:
        """Return True if a model is up to date, or its newer configuration failed to load and has to wait."""
        return resident.stamp == stamp or (stamp is not None and self.backoff.waits(resident.name, stamp))

    async def _wait(self, name: str, resident: Resident | None) -> Resident:
        """Wait for a load. It continues if a waiting request is cancelled."""
        if resident is None or resident.state is not State.LOADING:
            resident = self.lifecycle.begin(name, resident)
        if resident.waiting >= self.most_waiting:
            raise ApiError(
                429,
                f"{resident.waiting} requests wait for {name} to be loaded, which is the limit; send this one again "
                "later",
                code="queue_full",
                retry_after=2,
            )
        assert resident.task is not None
        resident.waiting += 1
        resident.leases += 1
        self.measures.waits.inc()
        try:
            await asyncio.shield(resident.task)
        except BaseException as error:
            self.release(resident)
            before = self.models.get(name)
            if before is None or before.state is not State.READY or not isinstance(error, ApiError):
                raise
            before.leases += 1  # a version that fails to load does not replace the one that answers
            return before
        finally:
            resident.waiting -= 1
        return resident

"""Loads and unloads models, each in the order that its engines and earlier versions require."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.backoff import Backoff, failed
from builder.serving.gateway.residency.measures import Measures
from builder.serving.gateway.residency.needs import Needs
from builder.serving.gateway.residency.offered import Offered
from builder.serving.gateway.residency.resident import ENDED, Resident, State
from builder.serving.gateway.residency.room import Room

GROWS = 1.15  # ratio of a process that has answered to one just loaded (42 and 37 MB), used until the next measurement


class Loading(Protocol):
    """Operations of Triton and of the machine that the lifecycle needs."""

    async def needs(self, name: str, version: str) -> Needs:
        """Return an estimate of what a version needs."""
        ...

    async def load(self, resident: Resident, *, instead: bool) -> int | None:
        """Load a version; `instead`: replace the version that answers, which does so until then.

        Returns the measured bytes; None if they cannot be measured. Raises ApiError.
        """
        ...

    async def unload(self, name: str) -> None:
        """Unload a front or an engine. Returns once its memory is free."""
        ...


class Lifecycle:
    """Lifecycle of the models in `room`: loaded by `loading`, and evicted when others need their memory.

    Models and server together may use `budget` bytes; `pins` are never unloaded.
    """

    def __init__(
        self,
        offered: Offered,
        loading: Loading,
        measures: Measures,
        budget: int,
        pins: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.offered, self.loading, self.measures = offered, loading, measures
        self.room = Room(budget, pins, self._evict, now)
        self.backoff = Backoff(now)
        self.known: dict[str, tuple[str, int]] = {}  # measured (version, bytes)
        measures.budget.set(budget)

    def begin(self, name: str, before: Resident | None) -> Resident:
        """Start to load a model; `before`: the version that answers by that name now. Raises ApiError."""
        offer = self.offered.offer(name)
        if offer.model is None:
            raise ApiError(404, f"{name} is not a model for clients", param="model", code="model_not_found")
        pause = self.backoff.pause(name, offer.stamp)
        resident = self.room.models[name] = Resident(name, offer.stamp, offer.model.version)
        self.room.models.move_to_end(name)
        resident.size = before.size if before is not None else 0
        resident.task = asyncio.ensure_future(self._load(resident, before, pause))
        resident.task.add_done_callback(_noticed)
        return resident

    def leave(self, resident: Resident) -> None:
        """Unload a model."""
        del self.room.models[resident.name]
        self._go(resident)

    def _go(self, resident: Resident) -> None:
        resident.state = State.LEAVING
        self.room.leaving.add(resident)
        resident.task = asyncio.ensure_future(self._unload(resident))
        resident.task.add_done_callback(_noticed)

    def weigh(self, resident: Resident, size: int) -> None:
        """Record that a model was measured to use `size` bytes."""
        resident.size = max(size, resident.reserved)
        self.known[resident.name] = (resident.version, size)

    def count(self) -> None:
        """Update the metrics of what is loaded."""
        self.measures.models.set(sum(r.state is State.READY for r in self.room.models.values()))
        self.measures.bytes.set(self.room.used())

    async def _load(self, resident: Resident, before: Resident | None, pause: float) -> None:
        begun = started = self.room.now()
        try:
            await asyncio.sleep(pause)
            await self._until_gone({resident.name})
            needs = await self._needs(resident)
            if before is not None and needs.size <= self.room.most(resident) < needs.size + before.size:
                await self._make_way(resident, before)
                before = None
            resident.engines, resident.reserved = needs.engines, needs.reserved
            await self._until_gone(set(needs.engines))
            await self.room.wait_for(resident, needs.size)
            started = self.room.now()
            size = await self._loaded(resident, instead=before is not None)
        except BaseException as error:
            self._failed(resident, before, error)
            raise
        resident.state, resident.since = State.READY, self.room.now()
        resident.stays_until = resident.since + (resident.since - started)  # at least as long as its load took
        grown = needs.size if size is None else max(self._measured_size(resident), int(GROWS * size))
        resident.size = max(grown, needs.reserved)
        self.measures.loads.inc()
        self.measures.load_s.observe(self.room.now() - begun)
        if before is not None:
            with suppress(ApiError):
                await self._unload_engines(before)
        self.room.make()
        self.count()

    async def _make_way(self, resident: Resident, before: Resident) -> None:
        """Unload the version that answers, once it is idle: memory does not fit both. Raises ApiError."""
        await self.room.until_idle(before)
        resident.size = 0
        self._go(before)
        await self._until_gone({before.name})

    async def _loaded(self, resident: Resident, *, instead: bool) -> int | None:
        try:
            return await resident.unless_dead(self.loading.load(resident, instead=instead))
        except TimeoutError as error:
            why = f"{ENDED} while it was loaded; where that goes on, Triton waits for it until it is started again"
            raise ApiError(503, why, code="model_failed") from error

    async def _needs(self, resident: Resident) -> Needs:
        needs = await self.loading.needs(resident.name, resident.version)
        return replace(needs, size=max(self._measured_size(resident) or needs.size, needs.reserved))

    def _measured_size(self, resident: Resident) -> int:
        """Return the measured bytes of this version; 0 if it was never measured."""
        version, size = self.known.get(resident.name, ("", 0))
        return size if version == resident.version else 0

    def _failed(self, resident: Resident, before: Resident | None, error: BaseException) -> None:
        """Clean up after a failed load: unload the model, or keep the earlier version that still answers."""
        if isinstance(error, ApiError) and error.code == "model_failed" and resident.stamp is not None:
            self.measures.failures.inc()
            delay = self.backoff.note(resident.name, resident.stamp, error.message)
            error.message, error.retry_after = failed(resident.name, error.message, delay).message, delay
        elif (
            before is not None
            and isinstance(error, ApiError)
            and error.code == "no_room"
            and resident.stamp is not None
        ):
            self.backoff.note(resident.name, resident.stamp, error.message)
        if before is not None:
            self.room.models[resident.name] = before
        elif resident.has_room and not isinstance(error, asyncio.CancelledError):
            self.leave(resident)
        else:
            del self.room.models[resident.name]

    def _evict(self, resident: Resident) -> None:
        self.measures.evictions.inc()
        self.leave(resident)

    async def _unload(self, resident: Resident) -> None:
        try:
            await self.loading.unload(resident.name)
            await self._unload_engines(resident)
        except ApiError as error:
            logging.getLogger(__name__).warning("%s is not unloaded: %s", resident.name, error.message)
        finally:
            self.room.leaving.discard(resident)
            self.room.make()
            self.count()

    async def _unload_engines(self, resident: Resident) -> None:
        """Unload the engines that only this model called."""
        for engine in resident.engines:
            if not any(engine in other.engines for other in self.room.models.values()):
                await self.loading.unload(engine)

    async def _until_gone(self, names: set[str]) -> None:
        """Wait until models that are being unloaded under these names are gone."""
        for other in list(self.room.leaving):
            if other.task is not None and names & {other.name, *other.engines}:
                await asyncio.wait({other.task})


def _noticed(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a load that no request waits for any more."""
    if not task.cancelled():
        task.exception()

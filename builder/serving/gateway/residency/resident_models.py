"""Load models for requests, keep them loaded while they answer, and unload them when others need their memory.

Everything runs on one event loop and needs no lock: a request that finds its model loaded takes a lease without
waiting. Other requests wait for the load of their model, which they share. Loads get memory in order of arrival; the
least recently requested models are unloaded for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from builder.serving.gateway.background import start_task
from builder.serving.gateway.errors import ApiError, queue_full
from builder.serving.gateway.metrics import LoadingMetrics
from builder.serving.gateway.residency.backoff import LoadBackoff, failed
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.memory_budget import MemoryBudget
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.residency.resident_model import PROCESS_DIED, ResidentModel, State

UNLOADED = "Request for unknown model: "  # another client has unloaded it; running requests are still answered
GROWTH = 1.15  # ratio of a process that has answered to one just loaded (42 and 37 MB), used until the next measurement


class ResidentModels:
    """Models that are loaded or loading. Models and server together may use `budget` bytes.

    `pins` are never unloaded; `max_waiting`: maximum number of requests that wait for one model.
    """

    def __init__(
        self,
        repository_models: RepositoryModels,
        loader: TritonLoader,
        metrics: LoadingMetrics,
        budget: int,
        pins: Sequence[str] = (),
        max_waiting: int = 256,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository_models, self.loader, self.metrics = repository_models, loader, metrics
        self.max_waiting = max_waiting
        self.budget = MemoryBudget(budget, pins, self._evict, now)
        self.models = self.budget.models
        self.backoff = LoadBackoff(now)
        self.measured: dict[str, tuple[str, int]] = {}  # (version, bytes)
        metrics.residencies.append(self)

    @property
    def loaded(self) -> int:
        return sum(resident.state is State.READY for resident in self.models.values())

    @property
    def used(self) -> int:
        return self.budget.used()

    @property
    def limit(self) -> int:
        return self.budget.total

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
                resident.requested_at = self.budget.now()
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
        self._remove(resident)

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
            served = configured.model.version
            number = served if await self.loader.stands_in(name, version) else version
            estimate = await self.loader.estimate(name, number)
            if self._is_known(name):  # requested meanwhile
                return
            stamp = configured.stamp if served == number else None
            resident = ResidentModel(name, stamp, version, State.READY, estimate.size, estimate.reserved)
            resident.engines, resident.since = estimate.engines, self.budget.now()
            resident.requested_at = resident.since
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
                resident.size = max(size, resident.reserved)
                self.measured[resident.name] = (resident.version, size)
        self.budget.rebalance()

    def unload_idle(self, name: str, idle_s: float) -> None:
        """Unload a model that this gateway loaded and that had no request for `idle_s` seconds, unless it is pinned."""
        resident = self.models.get(name)
        if resident is not None and resident.task is not None and self.budget.is_idle(resident, idle_s):
            self._evict(resident)

    async def _wait_loaded(self, name: str, resident: ResidentModel | None) -> ResidentModel:
        """Wait for a load. It continues if a waiting request is cancelled."""
        if resident is None or resident.state is not State.LOADING:
            resident = self._start_loading(name, resident)
        if resident.waiting >= self.max_waiting:
            raise queue_full(f"{resident.waiting} requests wait for {name} to be loaded", 2)
        assert resident.task is not None
        resident.waiting += 1
        resident.leases += 1
        resident.requested_at = self.budget.now()
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

    def _start_loading(self, name: str, previous: ResidentModel | None) -> ResidentModel:
        """Start to load a model; `previous`: the version that answers by that name now. Raises ApiError."""
        configured = self.repository_models.configured(name)
        if configured.model is None:
            raise ApiError(404, f"{name} is not a model for clients", param="model", code="model_not_found")
        pause = self.backoff.pause(name, configured.stamp)
        resident = self.models[name] = ResidentModel(name, configured.stamp, configured.model.version)
        self.models.move_to_end(name)
        resident.size = previous.size if previous is not None else 0
        resident.task = start_task(self._load(resident, previous, pause))
        return resident

    def _remove(self, resident: ResidentModel) -> None:
        """Unload a model that answers, or has been loading."""
        del self.models[resident.name]
        self._start_unloading(resident)

    def _start_unloading(self, resident: ResidentModel) -> None:
        resident.state = State.UNLOADING
        self.budget.unloading.add(resident)
        resident.task = start_task(self._unload(resident))

    async def _load(self, resident: ResidentModel, previous: ResidentModel | None, pause: float) -> None:
        requested = started = self.budget.now()
        try:
            await asyncio.sleep(pause)
            await self._wait_unloaded({resident.name})
            estimate = await self.loader.estimate(resident.name, resident.version)
            needed = max(self._measured_size(resident) or estimate.size, estimate.reserved)
            if previous is not None and needed <= self.budget.max_size(resident) < needed + previous.size:
                await self.budget.wait_idle(previous)  # then replaced, since both do not fit into memory
                resident.size = 0
                self._start_unloading(previous)
                await self._wait_unloaded({previous.name})
                previous = None
            resident.engines, resident.reserved = estimate.engines, estimate.reserved
            await self._wait_unloaded(set(estimate.engines))
            waiting_since = self.budget.now()
            await self.budget.wait_for(resident, needed)
            started = self.budget.now()
            self.metrics.load_wait_s.inc(started - waiting_since)
            size = await self._load_or_raise(resident, replace=previous is not None)
        except BaseException as error:
            self._clean_up(resident, previous, error)
            raise
        resident.state, resident.since = State.READY, self.budget.now()
        resident.stays_until = resident.since + (resident.since - started)  # at least as long as its load took
        grown = needed if size is None else max(self._measured_size(resident), int(GROWTH * size))
        resident.size = max(grown, estimate.reserved)
        self.metrics.loads.inc()
        self.metrics.load_s.observe(self.budget.now() - requested)
        if previous is not None:
            with suppress(ApiError):
                await self._unload_engines(previous)
        self.budget.rebalance()

    async def _load_or_raise(self, resident: ResidentModel, *, replace: bool) -> int | None:
        try:
            return await resident.run_while_alive(self.loader.load(resident, replace=replace))
        except TimeoutError as error:
            advice = "if that happens again, restart Triton, which may wait for the process forever"
            raise ApiError(503, f"{PROCESS_DIED} while it was loaded; {advice}", code="model_failed") from error

    def _measured_size(self, resident: ResidentModel) -> int:
        """Return the measured bytes of this version; 0 if it was never measured."""
        version, size = self.measured.get(resident.name, ("", 0))
        return size if version == resident.version else 0

    def _clean_up(self, resident: ResidentModel, previous: ResidentModel | None, error: BaseException) -> None:
        """Clean up after a failed load: unload the model, or keep the earlier version that still answers."""
        if isinstance(error, ApiError) and resident.stamp is not None:
            if error.code == "model_failed":
                self.metrics.failures.inc()
                delay = self.backoff.record_failure(resident.name, resident.stamp, error.message)
                error.message, error.retry_after = failed(resident.name, error.message, delay).message, delay
            elif error.code == "no_room" and previous is not None:
                self.backoff.record_failure(resident.name, resident.stamp, error.message)
        if previous is not None:
            self.models[resident.name] = previous
        elif resident.has_memory and not isinstance(error, asyncio.CancelledError):
            self._remove(resident)
        else:
            del self.models[resident.name]

    def _evict(self, resident: ResidentModel) -> None:
        self.metrics.evictions.inc()
        self._remove(resident)

    async def _unload(self, resident: ResidentModel) -> None:
        try:
            await self.loader.unload(resident.name)
            await self._unload_engines(resident)
        except ApiError as error:
            logging.getLogger(__name__).warning("%s is not unloaded: %s", resident.name, error.message)
        finally:
            self.budget.unloading.discard(resident)
            self.budget.rebalance()

    async def _unload_engines(self, resident: ResidentModel) -> None:
        """Unload the engines that only this model called."""
        for engine in resident.engines:
            if not any(engine in other.engines for other in self.models.values()):
                await self.loader.unload(engine)

    async def _wait_unloaded(self, names: set[str]) -> None:
        """Wait until models that are being unloaded under these names are gone."""
        for other in list(self.budget.unloading):
            if other.task is not None and names & {other.name, *other.engines}:
                await asyncio.wait({other.task})

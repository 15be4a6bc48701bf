"""Load and unload models, in the order that their engines and earlier versions require."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from builder.serving.gateway.background import start_task
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.metrics import LoadingMetrics
from builder.serving.gateway.residency.backoff import LoadBackoff, failed
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.memory_budget import MemoryBudget
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.residency.resident_model import PROCESS_DIED, ResidentModel, State

GROWTH = 1.15  # ratio of a process that has answered to one just loaded (42 and 37 MB), used until the next measurement


class Lifecycle:
    """Loads models with `loader`, and evicts them when others need their memory.

    Models and server together may use `budget` bytes; `pins` are never unloaded.
    """

    def __init__(
        self,
        repository_models: RepositoryModels,
        loader: TritonLoader,
        metrics: LoadingMetrics,
        budget: int,
        pins: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository_models, self.loader, self.metrics = repository_models, loader, metrics
        self.budget = MemoryBudget(budget, pins, self._evict, now)
        self.backoff = LoadBackoff(now)
        self.known: dict[str, tuple[str, int]] = {}  # measured (version, bytes)
        metrics.budget.set(budget)

    def start_loading(self, name: str, previous: ResidentModel | None) -> ResidentModel:
        """Start to load a model; `previous`: the version that answers by that name now. Raises ApiError."""
        configured = self.repository_models.configured(name)
        if configured.model is None:
            raise ApiError(404, f"{name} is not a model for clients", param="model", code="model_not_found")
        pause = self.backoff.pause(name, configured.stamp)
        resident = self.budget.models[name] = ResidentModel(name, configured.stamp, configured.model.version)
        self.budget.models.move_to_end(name)
        resident.size = previous.size if previous is not None else 0
        resident.task = start_task(self._load(resident, previous, pause))
        return resident

    def unload(self, resident: ResidentModel) -> None:
        """Unload a model."""
        del self.budget.models[resident.name]
        self._start_unloading(resident)

    def _start_unloading(self, resident: ResidentModel) -> None:
        resident.state = State.UNLOADING
        self.budget.unloading.add(resident)
        resident.task = start_task(self._unload(resident))

    def record_size(self, resident: ResidentModel, size: int) -> None:
        """Record that a model was measured to use `size` bytes."""
        resident.size = max(size, resident.reserved)
        self.known[resident.name] = (resident.version, size)

    def update_metrics(self) -> None:
        """Update the metrics of the loaded models."""
        self.metrics.models.set(sum(r.state is State.READY for r in self.budget.models.values()))
        self.metrics.bytes.set(self.budget.used())

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
            await self.budget.wait_for(resident, needed)
            started = self.budget.now()
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
        self.update_metrics()

    async def _load_or_raise(self, resident: ResidentModel, *, replace: bool) -> int | None:
        try:
            return await resident.run_while_alive(self.loader.load(resident, replace=replace))
        except TimeoutError as error:
            advice = "if that happens again, restart Triton, which may wait for the process forever"
            raise ApiError(503, f"{PROCESS_DIED} while it was loaded; {advice}", code="model_failed") from error

    def _measured_size(self, resident: ResidentModel) -> int:
        """Return the measured bytes of this version; 0 if it was never measured."""
        version, size = self.known.get(resident.name, ("", 0))
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
            self.budget.models[resident.name] = previous
        elif resident.has_memory and not isinstance(error, asyncio.CancelledError):
            self.unload(resident)
        else:
            del self.budget.models[resident.name]

    def _evict(self, resident: ResidentModel) -> None:
        self.metrics.evictions.inc()
        self.unload(resident)

    async def _unload(self, resident: ResidentModel) -> None:
        try:
            await self.loader.unload(resident.name)
            await self._unload_engines(resident)
        except ApiError as error:
            logging.getLogger(__name__).warning("%s is not unloaded: %s", resident.name, error.message)
        finally:
            self.budget.unloading.discard(resident)
            self.budget.rebalance()
            self.update_metrics()

    async def _unload_engines(self, resident: ResidentModel) -> None:
        """Unload the engines that only this model called."""
        for engine in resident.engines:
            if not any(engine in other.engines for other in self.budget.models.values()):
                await self.loader.unload(engine)

    async def _wait_unloaded(self, names: set[str]) -> None:
        """Wait until models that are being unloaded under these names are gone."""
        for other in list(self.budget.unloading):
            if other.task is not None and names & {other.name, *other.engines}:
                await asyncio.wait({other.task})

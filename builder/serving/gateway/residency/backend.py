"""Load a request's model and keep it loaded until the request is answered."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TextIO

from tritonclient.grpc import service_pb2

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.backend import Backend, Metadata, StreamFunction, as_stream
from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.limits import RateLimits
from builder.serving.gateway.metrics import LoadingMetrics, Metrics
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.memory import TritonProcesses
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.residency.resident_model import PROCESS_DIED, ResidentModel, State
from builder.serving.gateway.residency.resident_models import UNLOADED, ResidentModels
from builder.serving.gateway.settings import GatewaySettings, OnDemandSettings
from builder.serving.gateway.tensors import Outputs

MAX_ATTEMPTS = 3  # of a request whose model has been unloaded
DEATH_CHECK_INTERVAL_S = 1.0  # between two checks for dead processes
DEATH_CHECKS_PER_INDEX = 5  # checks for dead processes per check of all loaded models
UNLOADED_TEXTS = (UNLOADED, "is not at ready state", "is not healthy", PROCESS_DIED)  # Triton's messages, and ours
UNLOADED_STATUSES = (404, 500, 503)  # so that a 400 that quotes one of these texts does not match


class OnDemandBackend(Backend):
    """Backend that loads models on demand. `watch` has to run while it is used."""

    def __init__(self, triton: Any, residents: ResidentModels, processes: TritonProcesses) -> None:
        self.triton, self.residents, self.processes = triton, residents, processes

    async def ready(self) -> bool:
        """Return True if the server runs: Triton is not ready while it loads a model (--strict-readiness)."""
        try:
            return bool(await self.triton.reports_live())
        except ApiError:
            return False

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        async with aclosing(self._answers(request, metadata, as_stream(self.triton.infer))) as answers:
            return await anext(answers)

    def stream(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> AsyncGenerator[Outputs, None]:
        return self._answers(request, metadata, self.triton.stream)

    async def _answers(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata, send: StreamFunction
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of a model as they arrive. A request whose answer has started is not retried."""
        attempt, has_started = 0, False
        while True:
            attempt += 1
            resident = await self.residents.lease(request.model_name)
            try:
                async with aclosing(send(request, metadata)) as answers:
                    while (outputs := await _next(resident, answers)) is not None:
                        has_started = True
                        yield outputs
                return
            except ApiError as error:
                if has_started or not self._handle_if_unloaded(resident, error) or attempt == MAX_ATTEMPTS:
                    raise
            finally:
                self.residents.release(resident)

    async def watch(self) -> None:
        """Check regularly which models Triton has loaded and how much memory they use; keep pinned models loaded."""
        while True:
            try:
                await self._check_once()
            except Exception:  # a defect must not end the checks of a server that goes on answering
                logging.getLogger(__name__).exception("following the models of %s failed once", self.processes.url)
                await asyncio.sleep(DEATH_CHECK_INTERVAL_S)

    async def _check_once(self) -> None:
        try:
            await self._check_loaded()
        except ApiError as error:
            logging.getLogger(__name__).warning("the loaded models are unknown: %s", error.message)
        await asyncio.gather(*map(self._pin, self.residents.budget.pins))
        for _ in range(DEATH_CHECKS_PER_INDEX):
            await asyncio.sleep(DEATH_CHECK_INTERVAL_S)
            for stub in await asyncio.to_thread(self.processes.died):
                self.residents.handle_dead_process(stub.model, stub.pid)

    async def _check_loaded(self) -> None:
        started = self.residents.budget.now()
        ready = dict(await self.triton.index())
        loaded = [name for name, resident in self.residents.models.items() if resident.state is State.READY]
        for name in loaded:
            if name not in ready:
                self.residents.remove_unloaded(name, started)
        for name, version in ready.items():
            await self.residents.adopt(name, version)
        if await asyncio.to_thread(self.processes.find):
            usage = await asyncio.to_thread(self.processes.usage)
            self.residents.record_usage(usage.server, usage.models)
        else:
            self.residents.budget.rebalance()

    async def _pin(self, name: str) -> None:
        try:
            self.residents.release(await self.residents.lease(name))
        except ApiError as error:
            logging.getLogger(__name__).warning("pinned: %s", error.message)

    def _handle_if_unloaded(self, resident: ResidentModel, error: ApiError) -> bool:
        """Return True if a request failed because its model is not loaded any more."""
        if error.status not in UNLOADED_STATUSES or not any(text in error.message for text in UNLOADED_TEXTS):
            return False
        self.residents.handle_death(resident, error.message)
        return True


async def _next(resident: ResidentModel, answers: AsyncGenerator[Outputs, None]) -> Outputs | None:
    """Return the next answer, None at the end. Raises ApiError if the model dies meanwhile."""
    try:
        return await resident.run_while_alive(anext(answers, None))
    except TimeoutError as error:
        raise unavailable(f"{resident.name}: {PROCESS_DIED}", 1) from error


def make_on_demand_app(
    settings: GatewaySettings,
    options: OnDemandSettings,
    triton: Any,
    log: TextIO | None = sys.stdout,
    limits: RateLimits | None = None,
) -> tuple[AccessLog, OnDemandBackend]:
    """Return the application over `triton` and the backend, whose `watch` has to run.

    `triton`: a gateway.triton.Triton or an object with its methods.
    """
    metrics, models = Metrics(), RepositoryModels(options.repository)
    loading = LoadingMetrics(metrics.registry)
    backend = on_demand_backend(triton, settings.triton, models, options, loading, settings.max_waiting)
    return make_app(settings, backend, log, models=models, metrics=metrics, limits=limits), backend


def on_demand_backend(
    triton: Any,
    url: str,
    models: RepositoryModels,
    options: OnDemandSettings,
    metrics: LoadingMetrics,
    max_waiting: int,
    has_copy: bool = False,
) -> OnDemandBackend:
    """Return the backend that loads `models` on the Triton at `url`, within a memory budget of its own.

    `has_copy`: Triton may read a copy of their repository.
    """
    processes = TritonProcesses(url)
    loader = TritonLoader(triton, models, url, processes, options.verify_key, has_copy)
    residents = ResidentModels(models, loader, metrics, options.memory, options.pins, max_waiting)
    return OnDemandBackend(triton, residents, processes)

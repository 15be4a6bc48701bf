"""Backend that loads a request's model and keeps it loaded until the request is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.processes import Processes
from builder.serving.gateway.residency.resident import ENDED, Resident, State
from builder.serving.gateway.residency.residents import UNLOADED, Residents
from builder.serving.gateway.tensors import Outputs
from builder.serving.gateway.triton import Metadata

ATTEMPTS = 3  # attempts of a request whose model has been unloaded
DEATH_S = 1.0  # between two checks for dead processes
LOOKS = 5  # checks for dead processes per check of all loaded models
GONE = (UNLOADED, "is not at ready state", "is not healthy", ENDED)  # Triton's messages, and ours
T = TypeVar("T")
STATUSES = (404, 500, 503)  # so that a 400 that quotes one of these texts does not match


class OnDemand:
    """Backend that loads models on demand. `watch` has to run while it is used."""

    def __init__(self, triton: Any, residents: Residents, processes: Processes) -> None:
        self.triton, self.residents, self.processes = triton, residents, processes

    async def ready(self) -> bool:
        """Return True if the server answers and is ready."""
        return bool(await self.triton.ready())

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        """Return the answer of a model that answers once. Raises ApiError."""
        attempt = 0
        while True:
            attempt += 1
            resident = await self.residents.lease(request.model_name)
            try:
                answer: Outputs = await _unless_dead(resident, self.triton.infer(request, metadata))
                return answer
            except ApiError as error:
                if not self._has_gone(resident, error) or attempt == ATTEMPTS:
                    raise
            finally:
                self.residents.release(resident)

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of a model as they arrive. A request whose answer has begun is not retried."""
        attempt, begun = 0, False
        while True:
            attempt += 1
            resident = await self.residents.lease(request.model_name)
            try:
                async with aclosing(self.triton.stream(request, metadata)) as answers:
                    while (outputs := await _unless_dead(resident, anext(answers, None))) is not None:
                        begun = True
                        yield outputs
                return
            except ApiError as error:
                if begun or not self._has_gone(resident, error) or attempt == ATTEMPTS:
                    raise
            finally:
                self.residents.release(resident)

    async def watch(self) -> None:
        """Check regularly which models Triton has loaded and how much memory they use; keep pinned models loaded."""
        while True:
            try:
                await self._look()
            except ApiError as error:
                logging.getLogger(__name__).warning("what is loaded is not known: %s", error.message)
            await asyncio.gather(*map(self._pin, self.residents.room.pins))
            for _ in range(LOOKS):
                await asyncio.sleep(DEATH_S)
                for name, process in await asyncio.to_thread(self.processes.died):
                    self.residents.ended(name, process)

    async def _look(self) -> None:
        begun = time.monotonic()
        ready = dict(await self.triton.index())
        loaded = [name for name, resident in self.residents.models.items() if resident.state is State.READY]
        for name in loaded:
            if name not in ready:
                self.residents.lost(name, begun)
        for name, version in ready.items():
            await self.residents.adopt(name, version)
        if await asyncio.to_thread(self.processes.find):
            usage = await asyncio.to_thread(self.processes.usage)
            self.residents.measured(usage.server, usage.models)
        else:
            self.residents.room.make()

    async def _pin(self, name: str) -> None:
        try:
            self.residents.release(await self.residents.lease(name))
        except ApiError as error:
            logging.getLogger(__name__).warning("pinned: %s", error.message)

    def _has_gone(self, resident: Resident, error: ApiError) -> bool:
        """Return True if a request failed because its model is not loaded any more."""
        if error.status not in STATUSES or not any(text in error.message for text in GONE):
            return False
        self.residents.died(resident, error.message)
        return True


async def _unless_dead(resident: Resident, call: Awaitable[T]) -> T:
    """Return the result of a call. Raises ApiError if the model dies meanwhile."""
    try:
        return await resident.unless_dead(call)
    except TimeoutError as error:
        raise ApiError(503, f"{resident.name}: {ENDED}", code="unavailable", retry_after=1) from error

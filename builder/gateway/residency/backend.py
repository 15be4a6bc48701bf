"""Between a request and Triton: the request's model is loaded, and stays so until it is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2

from builder.gateway.errors import ApiError
from builder.gateway.residency.processes import Processes
from builder.gateway.residency.resident import ENDED, Resident, State
from builder.gateway.residency.residents import UNLOADED, Residents
from builder.gateway.tensors import Outputs
from builder.gateway.triton import Metadata

ATTEMPTS = 3  # of one request, where its model is gone when it comes
DEATH_S = 1.0  # from one look for dead processes to the next
LOOKS = 5  # of these, to a look at all that is loaded
GONE = (UNLOADED, "is not at ready state", "is not healthy", ENDED)  # Triton's, and ours
T = TypeVar("T")
STATUSES = (404, 500, 503)  # not those of a request that quotes one of the texts


class OnDemand:
    """A Backend that has models loaded. `watch` has to run for as long as it is used."""

    def __init__(self, triton: Any, residents: Residents, processes: Processes) -> None:
        self.triton, self.residents, self.processes = triton, residents, processes

    async def ready(self) -> bool:
        """Whether the server answers and says that it is ready."""
        return bool(await self.triton.ready())

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        """The answer of a model that has one. Raises ApiError."""
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
        """The answers of a model as they come. One that has begun to answer is not asked again."""
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
        """Look now and then at what Triton has loaded and what that takes, and have pinned models loaded."""
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
        """Whether a request failed because its model is not there any more."""
        if error.status not in STATUSES or not any(text in error.message for text in GONE):
            return False
        self.residents.died(resident, error.message)
        return True


async def _unless_dead(resident: Resident, call: Awaitable[T]) -> T:
    """What a call gives. Raises ApiError where the model dies meanwhile."""
    try:
        return await resident.unless_dead(call)
    except TimeoutError as error:
        raise ApiError(503, f"{resident.name}: {ENDED}", code="unavailable", retry_after=1) from error

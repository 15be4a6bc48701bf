"""Simulate a Triton: requests take its slots for a time by their tokens, and it can crash, be cut off or be slow."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import thread_time

from tritonclient.grpc import service_pb2

from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ServerUnreachable, unavailable
from builder.serving.gateway.fleet.request_work import encoding_work, generation_work
from builder.serving.gateway.tensors import Outputs
from builder.serving.gateway.triton import Triton

SLOTS = 8  # requests that run side by side
READ_TOKENS_PER_S = 4000.0  # of a prompt, in each slot
WRITE_TOKENS_PER_S = 50.0  # of an answer, in each slot
ENCODE_TOKENS_PER_S = 20_000.0
SHARED_TOKENS = 256  # at the beginning of a prompt, which a cache saves
CACHED_PREFIXES = 200  # of each server; the least recently used one is dropped
LOAD_S = 2.0  # to load a model on demand


@dataclass
class Stopwatch:
    """Measured (not simulated) processor seconds from a request to the choice of a server, for each decision."""

    started: float | None = None
    decisions: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.started = thread_time()

    def stop(self) -> None:
        if self.started is not None:
            self.decisions.append(thread_time() - self.started)
            self.started = None


class SimulatedTriton(Triton):
    """One server, which every gateway asks. `asked`: when requests came; `busy_s`: of its slots together.

    `is_explicit`: it starts without models, and loads and unloads them on request; otherwise it has `models`.
    """

    def __init__(self, name: str, models: Sequence[str], stopwatch: Stopwatch, is_explicit: bool = False) -> None:
        self.url, self.models, self.stopwatch = name, dict.fromkeys(models), stopwatch
        self.is_explicit = is_explicit
        self.is_up, self.slowness = True, 1.0
        self.connected = asyncio.Event()
        self.connected.set()
        self.free_slots = SLOTS
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.running: dict[asyncio.Future[None], None] = {}
        self.prefixes: OrderedDict[bytes, None] = OrderedDict()
        self.asked: list[float] = []
        self.busy_s, self.hits = 0.0, 0

    def crash(self) -> None:
        """End the process: its requests fail, and its cache is lost."""
        self.is_up = False
        for future in (*self.waiting, *self.running):
            if not future.done():
                future.set_exception(self._unreachable())
        self.waiting.clear()
        self.prefixes.clear()
        if self.is_explicit:
            self.models.clear()

    def serves(self, model: str) -> bool:
        """Return True if it answers requests to a model."""
        return self.is_up and self.connected.is_set() and model in self.models

    async def close(self, grace_s: float = 0.0) -> None:
        return None

    async def reports_ready(self) -> bool:
        await self._reach()
        return True

    async def reports_live(self) -> bool:
        return await self.reports_ready()

    async def index(self) -> list[tuple[str, str]]:
        await self._reach()
        return [(model, "1") for model in self.models]

    async def load(self, name: str) -> None:
        await self._reach()
        if name not in self.models:
            await asyncio.sleep(LOAD_S * self.slowness)
            await self._reach()
            self.models[name] = None

    async def unload(self, name: str) -> None:
        await self._reach()
        self.models.pop(name, None)

    async def is_model_ready(self, name: str, version: str) -> bool:
        return name in self.models

    async def models_in_memory(self) -> set[str]:
        return set(self.models)

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        self._arrive(request.model_name)
        tokens = encoding_work(request).prompt
        async with self._slot():
            await self._pass(tokens / ENCODE_TOKENS_PER_S)
        return {}

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield an answer in two pieces: one when the prompt is read, and the rest."""
        self._arrive(request.model_name)
        work = generation_work(request)
        async with self._slot():
            unread = work.prompt - SHARED_TOKENS * self._is_cached(work.prefix)
            await self._pass(unread / READ_TOKENS_PER_S)
            yield {}
            await self._pass(work.answer / WRITE_TOKENS_PER_S)
        yield {}

    def _arrive(self, model: str) -> None:
        self.stopwatch.stop()
        self.asked.append(asyncio.get_running_loop().time())
        if self.is_up and model not in self.models:
            raise unavailable(f"Request for unknown model: '{model}' is not found")

    async def _reach(self) -> None:
        await self.connected.wait()
        if not self.is_up:
            raise self._unreachable()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        await self._reach()
        if self.free_slots:
            self.free_slots -= 1
        else:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        try:
            yield
        finally:
            if self.waiting:
                self.waiting.popleft().set_result(None)
            else:
                self.free_slots += 1

    async def _pass(self, seconds: float) -> None:
        """Wait for a piece of work; its answer is late if the network is cut then."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self.running[future] = None
        self.busy_s += seconds * self.slowness
        timer = loop.call_later(seconds * self.slowness, _finish, future)
        try:
            await future
        finally:
            timer.cancel()
            del self.running[future]
        await self.connected.wait()

    def _is_cached(self, prefix: bytes) -> bool:
        is_cached = prefix in self.prefixes
        self.prefixes[prefix] = None
        self.prefixes.move_to_end(prefix)
        if len(self.prefixes) > CACHED_PREFIXES:
            self.prefixes.popitem(last=False)
        self.hits += is_cached
        return is_cached

    def _unreachable(self) -> ServerUnreachable:
        return ServerUnreachable(f"{self.url} is down")


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():  # a crash at the same moment came first
        future.set_result(None)

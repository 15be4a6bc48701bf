"""A share of a model's requests for another version of it, and what came of both: a canary.

The version is a model of its own for Triton, the candidate (builder/serve/promote.py). What it fails at before its
first answer, the model itself is asked, so that no client meets a failure of the candidate; a stream that it has begun
cannot be moved. A canary ends by itself when whoever ordered it is gone. The request's id says which side it is for:
one that is sent again goes there again.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field
from tritonclient.grpc import service_pb2

from builder.gateway.backend import Backend
from builder.gateway.errors import ApiError
from builder.gateway.tensors import Outputs

if TYPE_CHECKING:
    from builder.gateway.metrics import Metrics

LEASE_S = 10.0  # an order that is not repeated ends
KEPT = 4096  # times of each kind, the last ones
Metadata = Sequence[tuple[str, str]]
Asks = Callable[[Any, Metadata], AsyncGenerator[Outputs, None]]


class Order(BaseModel):
    """`share` of the requests for `model`, 0 to 1, go to `candidate`. `versions`: the numbers of the two."""

    model: str
    candidate: str
    versions: tuple[int, int]
    share: float = Field(ge=0, le=1)


@dataclass
class Side:
    """What came of one version. Times are in seconds: until the first answer, and between those of a stream."""

    version: int
    answers: int = 0
    failures: int = 0
    failure: str = ""  # the last one
    first: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def figures(self) -> dict[str, Any]:
        """As JSON, times in milliseconds."""
        times = {"first_ms": _quantiles(self.first), "between_ms": _quantiles(self.between)}
        return {name: getattr(self, name) for name in ("version", "answers", "failures", "failure")} | times


@dataclass
class Canary:
    """Two versions of one model, and how the requests are shared."""

    candidate: str
    sides: tuple[Side, Side]
    share: float = 0.0
    until: float = 0.0  # by the clock of its Split

    def takes(self, request: str) -> bool:
        """Whether the request of this id is for the candidate."""
        return zlib.crc32(request.encode()) < self.share * 2**32


class Split(Backend):
    """Triton, and in front of it the canaries that were ordered."""

    def __init__(self, triton: Backend, metrics: Metrics, now: Callable[[], float] = time.monotonic) -> None:
        self.triton, self.metrics, self.now = triton, metrics, now
        self.canaries: dict[str, Canary] = {}

    async def ready(self) -> bool:
        return await self.triton.ready()

    def order(self, order: Order) -> dict[str, Any]:
        """Share the requests of a model from now on; a share of 0 ends it. Returns what came of both so far."""
        canary = self.canaries.get(order.model)
        if canary is None or canary.candidate != order.candidate:
            canary = Canary(order.candidate, (Side(order.versions[0]), Side(order.versions[1])))
        canary.share, canary.until = order.share, self.now() + LEASE_S
        self.canaries[order.model] = canary
        if not order.share:
            del self.canaries[order.model]
        return dict(zip(("running", "candidate"), (side.figures() for side in canary.sides), strict=True))

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        canary = self._canary(request.model_name)
        if canary is None:
            return await self.triton.infer(request, metadata)
        async with aclosing(self._shared(canary, request, metadata, self._once)) as answers:
            return await anext(answers)

    def stream(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> AsyncGenerator[Outputs, None]:
        canary = self._canary(request.model_name)
        if canary is None:
            return self.triton.stream(request, metadata)
        return self._shared(canary, request, metadata, self.triton.stream)

    def _canary(self, model: str) -> Canary | None:
        canary = self.canaries.get(model)
        return canary if canary is not None and self.now() < canary.until else None

    async def _once(self, request: Any, metadata: Metadata) -> AsyncGenerator[Outputs, None]:
        yield await self.triton.infer(request, metadata)

    async def _shared(
        self, canary: Canary, request: Any, metadata: Metadata, asks: Asks
    ) -> AsyncGenerator[Outputs, None]:
        """The answers of the one side, or of the other where the candidate fails before it has answered."""
        (running, candidate), model = canary.sides, request.model_name
        refused: ApiError | None = None
        if canary.takes(request.id):
            request.model_name, began = canary.candidate, False
            try:
                async with aclosing(self._timed(model, candidate, request, metadata, asks)) as answers:
                    async for outputs in answers:
                        began = True
                        yield outputs
                return
            except ApiError as error:
                if began:
                    self._failed(model, candidate, error)
                    raise
                refused = error
            request.model_name = model
        try:
            async with aclosing(self._timed(model, running, request, metadata, asks)) as answers:
                async for outputs in answers:
                    if refused is not None:
                        self._failed(model, candidate, refused)
                        refused = None
                    yield outputs
        except ApiError as error:
            for side, reason in ((running, error), (candidate, refused)):
                if reason is not None and _is_fault(reason):
                    self._failed(model, side, reason)
            raise

    async def _timed(
        self, model: str, side: Side, request: Any, metadata: Metadata, asks: Asks
    ) -> AsyncGenerator[Outputs, None]:
        last, times = time.perf_counter(), side.first
        async with aclosing(asks(request, metadata)) as answers:
            async for outputs in answers:
                now = time.perf_counter()
                times.append(now - last)
                if times is side.first:
                    side.answers += 1
                    self.metrics.versions.labels(model, side.version).observe(now - last)
                last, times = now, side.between
                yield outputs

    def _failed(self, model: str, side: Side, error: ApiError) -> None:
        side.failures += 1
        side.failure = error.message
        self.metrics.failures.labels(model, side.version).inc()


def _is_fault(error: ApiError) -> bool:
    """Whether it is the server's, not the request's."""
    return error.status >= 500 or error.status == 429


def _quantiles(times: Sequence[float] | deque[float]) -> dict[str, float | None]:
    ordered = sorted(times)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        name: round(1000 * ordered[int(q * (len(ordered) - 1))], 3) if ordered else None for name, q in shares.items()
    }

"""Canary: sends a share of a model's requests to another version of it and compares the results.

The candidate version is a separate Triton model (builder/serving/promotion/promote.py). If the candidate fails before
its first answer, the model itself answers, so clients see no failure of the candidate; a stream that has begun cannot
be moved. A canary ends by itself when the process that ordered it stops renewing it. The request id decides the side,
so a retry goes to the same side.
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

from builder.serving.gateway.backend import Backend
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Outputs

if TYPE_CHECKING:
    from builder.serving.gateway.metrics import Metrics

LEASE_S = 10.0  # an order that is not repeated expires
KEPT = 4096  # latest times kept of each kind
Metadata = Sequence[tuple[str, str]]
Asks = Callable[[Any, Metadata], AsyncGenerator[Outputs, None]]


class Order(BaseModel):
    """Order to send `share` (0 to 1) of the requests for `model` to `candidate`. `versions`: their version numbers."""

    model: str
    candidate: str
    versions: tuple[int, int]
    share: float = Field(ge=0, le=1)


@dataclass
class Side:
    """Results of one version. Times are in seconds: to the first answer, and between the answers of a stream."""

    version: int
    answers: int = 0
    failures: int = 0
    failure: str = ""  # message of the last failure
    first: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON, with times in milliseconds."""
        times = {"first_ms": _quantiles(self.first), "between_ms": _quantiles(self.between)}
        return {name: getattr(self, name) for name in ("version", "answers", "failures", "failure")} | times


@dataclass
class Canary:
    """Two versions of one model, and the share of requests that the candidate gets."""

    candidate: str
    sides: tuple[Side, Side]
    share: float = 0.0
    until: float = 0.0  # expiry, by the clock of its Split

    def takes(self, request: str) -> bool:
        """Return True if the request with this id goes to the candidate."""
        return zlib.crc32(request.encode()) < self.share * 2**32


class Split(Backend):
    """Backend that applies the ordered canaries in front of Triton."""

    def __init__(self, triton: Backend, metrics: Metrics, now: Callable[[], float] = time.monotonic) -> None:
        self.triton, self.metrics, self.now = triton, metrics, now
        self.canaries: dict[str, Canary] = {}

    async def ready(self) -> bool:
        return await self.triton.ready()

    def order(self, order: Order) -> dict[str, Any]:
        """Start, renew or (with a share of 0) end a canary. Returns the results of both versions so far."""
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
        """Yield the answers of one version, or of the running one if the candidate fails before its first answer."""
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
    """Return True if the server is at fault, not the request."""
    return error.status >= 500 or error.status == 429


def _quantiles(times: Sequence[float] | deque[float]) -> dict[str, float | None]:
    ordered = sorted(times)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        name: round(1000 * ordered[int(q * (len(ordered) - 1))], 3) if ordered else None for name, q in shares.items()
    }

"""Run a canary: send a share of a model's requests to another version of it and compare the results.

The candidate version is a separate Triton model (builder/serving/promotion/promote.py). If the candidate fails before
its first answer, the model itself answers, so clients see no failure of the candidate; a stream that has started cannot
be moved. A canary ends by itself when the process that started it stops renewing it. The request id decides the
version, so a retry goes to the same one.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field
from tritonclient.grpc import service_pb2

from builder.serving.gateway.backend import Backend, Metadata, StreamFunction, as_stream
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Outputs

if TYPE_CHECKING:
    from builder.serving.gateway.metrics import Metrics

LEASE_S = 10.0  # a canary that is not renewed expires
MAX_SAMPLES = 4096  # latest times kept of each kind
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class CanaryRequest(BaseModel):
    """Request to send `share` (0 to 1) of the requests for `model` to `candidate`. `versions`: their numbers."""

    model: str
    candidate: str
    versions: tuple[int, int]
    share: float = Field(ge=0, le=1)


@dataclass
class VersionStats:
    """Results of one version. Times are in seconds: to the first answer, and between the answers of a stream."""

    version: int
    answers: int = 0
    failures: int = 0
    failure: str = ""  # message of the last failure
    first: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def body(self) -> dict[str, Any]:
        """Return the results as JSON, with times in milliseconds."""
        times = {"first_ms": _quantiles(self.first), "between_ms": _quantiles(self.between)}
        return {name: getattr(self, name) for name in ("version", "answers", "failures", "failure")} | times


@dataclass
class Canary:
    """Two versions of one model, and the share of requests that the candidate gets."""

    candidate: str
    running_stats: VersionStats
    candidate_stats: VersionStats
    share: float = 0.0
    expires_at: float = 0.0  # by the clock of its CanaryBackend

    def selects(self, request_id: str) -> bool:
        """Return True if this request goes to the candidate."""
        return zlib.crc32(request_id.encode()) < self.share * 2**32


class CanaryBackend(Backend):
    """Backend that applies canaries in front of Triton."""

    def __init__(self, triton: Backend, metrics: Metrics, now: Callable[[], float] = time.monotonic) -> None:
        self.triton, self.metrics, self.now = triton, metrics, now
        self.canaries: dict[str, Canary] = {}

    async def ready(self) -> bool:
        return await self.triton.ready()

    def set_canary(self, request: CanaryRequest) -> dict[str, Any]:
        """Start, renew or (with a share of 0) end a canary. Returns the results of both versions so far."""
        canary = self.canaries.get(request.model)
        if canary is None or canary.candidate != request.candidate:
            canary = Canary(request.candidate, VersionStats(request.versions[0]), VersionStats(request.versions[1]))
        canary.share, canary.expires_at = request.share, self.now() + LEASE_S
        self.canaries[request.model] = canary
        if not request.share:
            del self.canaries[request.model]
        return {"running": canary.running_stats.body(), "candidate": canary.candidate_stats.body()}

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        canary = self._canary(request.model_name)
        if canary is None:
            return await self.triton.infer(request, metadata)
        async with aclosing(self._split(canary, request, metadata, as_stream(self.triton.infer))) as answers:
            return await anext(answers)

    def stream(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> AsyncGenerator[Outputs, None]:
        canary = self._canary(request.model_name)
        if canary is None:
            return self.triton.stream(request, metadata)
        return self._split(canary, request, metadata, self.triton.stream)

    def _canary(self, model: str) -> Canary | None:
        canary = self.canaries.get(model)
        return canary if canary is not None and self.now() < canary.expires_at else None

    async def _split(
        self, canary: Canary, request: Any, metadata: Metadata, send: StreamFunction
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of one version, or of the running one if the candidate fails before its first answer."""
        running, candidate, model = canary.running_stats, canary.candidate_stats, request.model_name
        candidate_error: ApiError | None = None
        if canary.selects(request.id):
            request.model_name, has_started = canary.candidate, False
            try:
                async with aclosing(self._timed(model, candidate, request, metadata, send)) as answers:
                    async for outputs in answers:
                        has_started = True
                        yield outputs
                return
            except ApiError as error:
                if has_started:
                    self._count_failure(model, candidate, error)
                    raise
                candidate_error = error
            request.model_name = model
        try:
            async with aclosing(self._timed(model, running, request, metadata, send)) as answers:
                async for outputs in answers:
                    if candidate_error is not None:
                        self._count_failure(model, candidate, candidate_error)
                        candidate_error = None
                    yield outputs
        except ApiError as error:
            for stats, reason in ((running, error), (candidate, candidate_error)):
                if reason is not None and (reason.status >= 500 or reason.status == 429):  # not the request's fault
                    self._count_failure(model, stats, reason)
            raise

    async def _timed(
        self, model: str, stats: VersionStats, request: Any, metadata: Metadata, send: StreamFunction
    ) -> AsyncGenerator[Outputs, None]:
        last, times = time.perf_counter(), stats.first
        async with aclosing(send(request, metadata)) as answers:
            async for outputs in answers:
                now = time.perf_counter()
                times.append(now - last)
                if times is stats.first:
                    stats.answers += 1
                    self.metrics.versions.labels(model, stats.version).observe(now - last)
                last, times = now, stats.between
                yield outputs

    def _count_failure(self, model: str, stats: VersionStats, error: ApiError) -> None:
        stats.failures += 1
        stats.failure = error.message
        self.metrics.failures.labels(model, stats.version).inc()


def _quantiles(times: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(times)
    if not ordered:
        return dict.fromkeys(QUANTILES)
    return {name: round(1000 * ordered[int(q * (len(ordered) - 1))], 3) for name, q in QUANTILES.items()}


async def set_canary(context: RequestContext) -> dict[str, Any]:
    """Serve POST /admin/canary: share a model's requests with a candidate for a while. Raises ApiError."""
    models = context.gateway.models.registry
    if not isinstance(models, Catalogue):
        raise ApiError(501, "canaries are not available with models loaded on demand")
    if context.body.share:
        await models.require_candidate(context.body.candidate, context.body.model)
    return context.gateway.triton.set_canary(context.body)

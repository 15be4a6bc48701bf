"""One request on its way: who asks, what of, and what is known of its answer so far."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from builder.gateway.bound import Bound
from builder.gateway.errors import ApiError
from builder.gateway.models import Model, Models, one_of
from builder.gateway.settings import Settings
from builder.gateway.tensors import Outputs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tritonclient.grpc import service_pb2

    from builder.gateway.canary import Split
    from builder.gateway.metrics import Metrics

FACTS = "builder.gateway.facts"  # where a scope has them


class Backend(Protocol):
    """What a request asks of Triton."""

    async def infer(
        self, request: service_pb2.ModelInferRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> Outputs: ...

    def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> AsyncGenerator[Outputs, None]: ...

    async def ready(self) -> bool: ...


@dataclass(frozen=True)
class Gateway:
    """What all requests share."""

    settings: Settings
    triton: Split
    models: Models
    metrics: Metrics
    bound: Bound


@dataclass
class Facts:
    """What the access log and the metrics say of a request. Tokens are those that count for its key."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    method: str = ""
    path: str = ""
    client: str = ""
    key: str = ""
    model: str = ""
    waits_for: str = ""  # a model whose requests are bounded
    status: int = 0
    error: str = ""
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def refused(self, error: ApiError) -> None:
        """Note why there is no answer: the server's fault in words; of a request's only the field, never its value."""
        self.error = error.message if error.status >= 500 else error.code or error.param or "refused"


@dataclass(frozen=True)
class Call:
    """A request that was read and checked. `body` is what its route's schema made of the JSON."""

    gateway: Gateway
    facts: Facts
    body: Any
    path: Mapping[str, str]
    metadata: tuple[tuple[str, str], ...] = ()  # for Triton

    async def model(self, name: str) -> Model:
        """The model that the request names. Raises ApiError 404."""
        return self._of(await self.gateway.models.get(name))

    async def model_for(self, what: str, fits: Any, name: str | None) -> Model:
        """The model that the request names, or the only one that `fits`. Raises ApiError."""
        return self._of(await one_of(self.gateway.models, what, fits, name))

    def _of(self, model: Model) -> Model:
        """Note whose request it is. Raises ApiError 429 where too many wait for this model."""
        self.facts.model = model.name
        if not model.streams:
            self.gateway.bound.enter(model.name)
            self.facts.waits_for = model.name
        return model

"""Hold the state of a request in progress: its record, its body and its model."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from builder.serving.gateway.adapters import AdaptedModels
from builder.serving.gateway.catalogue import select_model
from builder.serving.gateway.errors import ApiError, queue_full
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.validation import validate_body

if TYPE_CHECKING:
    from builder.serving.gateway.canary import CanaryBackend
    from builder.serving.gateway.metrics import Metrics

RECORD = "builder.serving.gateway.context"  # key of the ASGI scope


@dataclass
class RequestRecord:
    """Fields of the access log and the metrics. The tokens count towards the limit of the request's key."""

    method: str
    path: str
    client: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = ""
    model: str = ""
    limited_model: str = ""  # model in whose `running` requests this one counts
    status: int = 0
    error: str = ""
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def has_response(self) -> bool:
        """True once the response has started; AccessLog records its status."""
        return self.status != 0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    @property
    def created_at(self) -> int:
        """Time at which the request came, in seconds since 1970."""
        return int(time.time() - self.elapsed_s)

    def fail(self, error: ApiError) -> None:
        """Record why an answer broke off after it had started."""
        self.set_error(error)
        self.status = error.status

    def set_error(self, error: ApiError) -> None:
        """Record why there is no answer: the message of a server error; for a bad request its field, not the value."""
        self.error = error.message if error.status >= 500 else error.code or error.param or "refused"


@dataclass(frozen=True)
class GatewayState:
    """State that all requests share. `running`: the requests in progress to each model that answers once."""

    settings: GatewaySettings
    triton: CanaryBackend
    models: AdaptedModels
    metrics: Metrics
    running: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class RequestContext:
    """A request that was read and validated. `body` is an instance of the route's schema."""

    gateway: GatewayState
    record: RequestRecord
    body: Any
    path: Mapping[str, str]
    metadata: tuple[tuple[str, str], ...] = ()  # gRPC metadata for Triton

    async def model(self, name: str) -> ServedModel:
        """Return the model that the request names. Raises ApiError 404 if it does not exist."""
        return self._record(await self.gateway.models.get(name))

    async def model_for(self, what: str, fits: Any, name: str | None) -> ServedModel:
        """Return the model that the request names, or the only one that `fits`. Raises ApiError."""
        return self._record(await select_model(self.gateway.models, what, fits, name))

    def with_body(self, schema: type[BaseModel]) -> RequestContext:
        """Return this request with its body, of any fields until now, validated as `schema`. Raises ApiError."""
        return replace(self, body=validate_body(schema, self.body.model_extra))

    def _record(self, model: ServedModel) -> ServedModel:
        """Record the request's model. Raises ApiError 429 if too many requests wait for this model.

        A generating model refuses requests beyond its own queue at once. The front of an encoder checks its queue only
        once a second while it is busy, so the gateway limits its requests.
        """
        self.gateway.metrics.start(self.record, model.name)
        if not model.is_decoupled:
            running, limit = self.gateway.running, self.gateway.settings.max_waiting
            if running[model.name] >= limit:
                raise queue_full(f"{limit} requests of {model.name} wait already")
            running[model.name] += 1
            self.record.limited_model = model.name
        return model

"""Hold the state of a request in progress: its client, its body and the facts collected so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.serving.gateway.concurrency import ConcurrencyLimit
from builder.serving.gateway.model_registry import ModelRegistry, select_model
from builder.serving.gateway.request_record import RequestRecord
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from builder.serving.gateway.canary import CanaryBackend
    from builder.serving.gateway.metrics import Metrics


@dataclass(frozen=True)
class GatewayState:
    """State that all requests share."""

    settings: GatewaySettings
    triton: CanaryBackend
    models: ModelRegistry
    metrics: Metrics
    concurrency: ConcurrencyLimit


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

    def _record(self, model: ServedModel) -> ServedModel:
        """Record the request's model. Raises ApiError 429 if too many requests wait for this model."""
        self.gateway.metrics.start(self.record, model.name)
        if not model.is_decoupled:
            self.gateway.concurrency.acquire(model.name)
            self.record.limited_model = model.name
        return model

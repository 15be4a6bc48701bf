"""One request in progress: its client, its body and the facts collected so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.serving.gateway.bound import Bound
from builder.serving.gateway.facts import Facts
from builder.serving.gateway.models import Model, Models, one_of
from builder.serving.gateway.settings import Settings

if TYPE_CHECKING:
    from builder.serving.gateway.canary import Split
    from builder.serving.gateway.metrics import Metrics


@dataclass(frozen=True)
class Gateway:
    """State that all requests share."""

    settings: Settings
    triton: Split
    models: Models
    metrics: Metrics
    bound: Bound


@dataclass(frozen=True)
class Call:
    """A request that was read and validated. `body` is an instance of the route's schema."""

    gateway: Gateway
    facts: Facts
    body: Any
    path: Mapping[str, str]
    metadata: tuple[tuple[str, str], ...] = ()  # gRPC metadata for Triton

    async def model(self, name: str) -> Model:
        """Return the model that the request names. Raises ApiError 404 if it does not exist."""
        return self._of(await self.gateway.models.get(name))

    async def model_for(self, what: str, fits: Any, name: str | None) -> Model:
        """Return the model that the request names, or the only one that `fits`. Raises ApiError."""
        return self._of(await one_of(self.gateway.models, what, fits, name))

    def _of(self, model: Model) -> Model:
        """Record the request's model. Raises ApiError 429 if too many requests wait for this model."""
        self.gateway.metrics.start(self.facts, model.name)
        if not model.streams:
            self.gateway.bound.enter(model.name)
            self.facts.waits_for = model.name
        return model

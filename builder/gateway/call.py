"""One request on its way: who asks, what of, and what is known of its answer so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.gateway.bound import Bound
from builder.gateway.facts import Facts
from builder.gateway.models import Model, Models, one_of
from builder.gateway.settings import Settings

if TYPE_CHECKING:
    from builder.gateway.canary import Split
    from builder.gateway.metrics import Metrics


@dataclass(frozen=True)
class Gateway:
    """What all requests share."""

    settings: Settings
    triton: Split
    models: Models
    metrics: Metrics
    bound: Bound


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
        self.gateway.metrics.start(self.facts, model.name)
        if not model.streams:
            self.gateway.bound.enter(model.name)
            self.facts.waits_for = model.name
        return model

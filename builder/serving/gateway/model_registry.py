"""Define the models that clients may name, and select one for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.served_model import ServedModel

MAX_LISTED_NAMES = 50


class ModelRegistry(Protocol):
    """Models that clients may name."""

    async def all(self) -> list[ServedModel]:
        """Return every model, by name. Raises ApiError."""
        ...

    async def get(self, name: str) -> ServedModel:
        """Return the model named `name`. Raises ApiError 404, or 503 if it is temporarily unavailable."""
        ...

    def temporarily_unavailable(self) -> list[ServedModel]:
        """Return known models that are not ready now, but still in the repository."""
        ...


async def select_model(
    models: ModelRegistry, purpose: str, fits: Callable[[ServedModel], bool], name: str | None
) -> ServedModel:
    """Return the model `name`, or the only one that `fits`. Raises ApiError if none or several fit.

    `purpose`: completes "a model" in messages, such as "for embeddings".
    """
    if name is not None:
        model = await models.get(name)
        if not fits(model):
            raise ApiError(400, f"{name} is a model for {model.task}; expected one {purpose}", param="model")
        return model
    fitting = [model for model in await models.all() if fits(model)]
    if not fitting:
        for model in filter(fits, models.temporarily_unavailable()):
            raise model_unavailable(model.name)
    if len(fitting) != 1:
        names = join_names([model.name for model in fitting])
        message = f"choose a model with `model`; available models {purpose}: {names}"
        raise ApiError(400, message, param="model", code="no_model")
    return fitting[0]


def model_not_found(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for an unknown model name; `known` are the existing names."""
    message = f"the model {name!r} does not exist; available models: {join_names(known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def model_unavailable(name: str) -> ApiError:
    """Return the error for a model that is not loaded now: the client can retry later."""
    return unavailable(f"{name} is not loaded now; send this again later")


def join_names(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more or "none"

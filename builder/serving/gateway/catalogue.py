"""Define the models that clients may name, and list those of Triton, refreshed regularly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from builder.serving.gateway.background import start_task
from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.served_model import CANDIDATE_OF, ServedModel, hosted_models, read_model

MAX_LISTED_NAMES = 50
REFRESH_AFTER_S = 10.0  # the next request then starts a refresh, without waiting for it
MIN_REFRESH_INTERVAL_S = 1.0  # between two refreshes for an unknown name


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


class ModelIndex(Protocol):
    """Part of Triton's API that the catalogue needs; see gateway.triton.Triton."""

    async def index(self) -> list[tuple[str, str]]: ...

    async def repository_models(self) -> set[str]: ...

    async def config(self, name: str, version: str) -> Any: ...

    async def hosted(self, front: str) -> str: ...

    async def adapters(self, model: ServedModel) -> list[str]: ...


class Catalogue:
    """Front models that Triton has ready: the ones that declare a task."""

    def __init__(self, server: ModelIndex) -> None:
        self.server = server
        self.models: dict[str, ServedModel] = {}
        self.candidates: dict[str, ServedModel] = {}  # may replace a model; clients cannot request them
        self.hosted: dict[str, tuple[tuple[ServedModel, str], dict[str, ServedModel]]] = {}
        self.seen: dict[str, ServedModel] = {}  # each model as it was when last ready
        self.ready: set[str] = set()  # includes engines and shared fronts
        self.known: set[str] = set()
        self.read_at = -1e9
        self.refreshing: asyncio.Task[None] | None = None

    async def all(self) -> list[ServedModel]:
        """Return every model, by name. Raises ApiError if Triton does not answer."""
        await self._refresh_if_old()
        return sorted(self.models.values(), key=lambda model: model.name)

    async def get(self, name: str) -> ServedModel:
        """Return the model named `name`. Raises ApiError 404 with the existing names, or 503 while it is reloaded."""
        if self.read_at + REFRESH_AFTER_S < time.monotonic():
            if self.models:
                self._refresh()  # in the background: this request does not wait
            else:
                await asyncio.shield(self._refresh())  # shared: a cancelled request must not cancel it for others
        if name not in self.models:
            await self._refresh_if_old()
        model = self.models.get(name)
        if model is None:
            raise model_unavailable(name) if self._is_reloading(name) else model_not_found(name, sorted(self.models))
        return model

    async def adapter_names(self, model: ServedModel) -> list[str]:
        """Ask a model for its adapters. Raises ApiError."""
        return await self.server.adapters(model)

    def temporarily_unavailable(self) -> list[ServedModel]:
        """Return the models that are not ready now, including those that were unloaded for good."""
        return [model for name, model in self.seen.items() if name not in self.models and self._is_reloading(name)]

    def _is_reloading(self, name: str) -> bool:
        """Return True if a model, or the shared front that answers for it, is in the repository but not ready."""
        model = self.seen.get(name)
        entry = name if model is None or model.front is None else model.front
        return entry in self.known and entry not in self.ready

    async def require_candidate(self, name: str, of: str) -> None:
        """Raise ApiError 404 unless `name` is a candidate to replace the model `of` and both are ready."""
        await self.get(of)
        if name not in self.candidates:
            await asyncio.shield(self._refresh())
        candidate = self.candidates.get(name)
        if candidate is None or candidate.parameters[CANDIDATE_OF] != of:
            raise ApiError(404, f"{name} is not a candidate to replace {of}", param="candidate")

    async def _refresh_if_old(self) -> None:
        if self.read_at + MIN_REFRESH_INTERVAL_S < time.monotonic():
            await asyncio.shield(self._refresh())

    def _refresh(self) -> asyncio.Task[None]:
        if self.refreshing is None or self.refreshing.done():
            self.refreshing = start_task(self._read())
        return self.refreshing

    async def _read(self) -> None:
        ready = await self.server.index()
        known = await self.server.repository_models()  # second, so that it contains every ready model
        configs = await asyncio.gather(*(self.server.config(*entry) for entry in ready), return_exceptions=True)
        models: dict[str, ServedModel] = {}
        candidates: dict[str, ServedModel] = {}
        for (name, version), config in zip(ready, configs, strict=True):
            if isinstance(config, ApiError):  # unloaded meanwhile
                continue
            if isinstance(config, BaseException):
                raise config
            model = read_model(config, version)
            if model is not None:
                (candidates if CANDIDATE_OF in model.parameters else models)[name] = model
        fronts = [models.pop(name) for name in list(models) if models[name].is_shared_front]
        for front in fronts:
            models = {**await self._hosted(front), **models}
        self.ready, self.known = {name for name, _ in ready}, known
        self.seen |= models
        self.models, self.candidates, self.read_at = models, candidates, time.monotonic()

    async def _hosted(self, front: ServedModel) -> dict[str, ServedModel]:
        """Return the models of a shared front, parsed again if hosted.json changed; the last known ones on an error."""
        try:
            text = await self.server.hosted(front.name)
        except ApiError:
            return self.hosted[front.name][1] if front.name in self.hosted else {}
        before = self.hosted.get(front.name)
        if before is None or before[0] != (front, text):
            self.hosted[front.name] = (front, text), hosted_models(front, text)
        return self.hosted[front.name][1]

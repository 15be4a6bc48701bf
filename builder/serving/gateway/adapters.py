"""Let clients name a model's LoRA adapter as MODEL:ADAPTER, wherever they name a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from builder.runtime.adapter_files import ADAPTER, NAME
from builder.serving.gateway.catalogue import ModelRegistry, model_not_found
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.served_model import ADAPTER_MARK, ServedModel


class AdapterRegistry(ModelRegistry, Protocol):
    """Models that clients may name, and their adapters."""

    async def adapter_names(self, model: ServedModel) -> list[str]:
        """Return the adapters of a model that takes some. Raises ApiError."""
        ...


class AdaptedModels:
    """Models of `registry`, and their adapters. Whether a model has an adapter, it says itself when it is asked."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self.registry = registry

    async def all(self) -> list[ServedModel]:
        return await self.registry.all()

    async def get(self, name: str) -> ServedModel:
        base, mark, adapter = name.partition(ADAPTER_MARK)
        model = await self.registry.get(base)
        if not mark:
            return model
        if ADAPTER.name not in model.inputs:
            message = f"{base} was built without --adapters; leave {mark}{adapter} out"
        elif not NAME.fullmatch(adapter):
            message = f"{adapter!r} is not the name of an adapter; GET /v1/models lists those of {base}"
        else:
            return replace(model, adapter=adapter)
        raise ApiError(404, message, param="model", code="model_not_found")

    def temporarily_unavailable(self) -> list[ServedModel]:
        return self.registry.temporarily_unavailable()

    async def adapters(self, model: ServedModel) -> list[ServedModel]:
        """Return `model` with each of its adapters; none if it cannot say now."""
        if ADAPTER.name not in model.inputs:
            return []
        try:
            return [replace(model, adapter=name) for name in await self.registry.adapter_names(model)]
        except ApiError:  # the list of the others is worth more
            return []

    async def get_listed(self, name: str) -> ServedModel:
        """Return the model `name`; unlike `get`, an adapter is looked up. Raises ApiError 404."""
        model = await self.get(name)
        if model.adapter:
            names = await self.registry.adapter_names(model)
            if model.adapter not in names:
                raise model_not_found(name, [replace(model, adapter=known).label for known in names])
        return model

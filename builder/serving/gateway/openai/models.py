"""Serve GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import asyncio
from typing import Any

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.served_model import ServedModel

CREATED = 0  # config.pbtxt lacks the build time, and OpenAI's clients need a number


async def list_models(context: RequestContext) -> dict[str, Any]:
    """List every available model, each followed by its adapters."""
    models = context.gateway.models
    known = await models.all()
    adapted = await asyncio.gather(*map(models.adapters, known))
    listed = [one for model, others in zip(known, adapted, strict=True) for one in (model, *others)]
    return {"object": "list", "data": [describe(model) for model in listed]}


async def show_model(context: RequestContext) -> dict[str, Any]:
    """Describe one model. Raises ApiError 404."""
    return describe(await context.gateway.models.get_listed(context.path["name"]))


def describe(model: ServedModel) -> dict[str, Any]:
    """Return OpenAI's object with additional fields for the page and for scripts."""
    return {
        "id": model.label,
        "object": "model",
        "created": CREATED,
        "owned_by": "build-repo",
        "parent": model.name if model.adapter else None,  # as vLLM names the model of an adapter
        "max_model_len": model.max_total_tokens or model.max_input_length,
        "task": model.task,
        "version": model.version,
        "chat": model.has_chat_template,
        "embeds": model.is_embedder,
        "labels": model.labels,
        "languages": model.languages,
        "report": model.report,
        "mask_token": model.parameters.get("mask_token"),
        "inputs": [
            {"name": f.name, "type": f.data_type, "dims": list(f.dims), "optional": f.optional}
            for f in model.inputs.values()
        ],
        "outputs": [{"name": f.name, "type": f.data_type, "dims": list(f.dims)} for f in model.outputs.values()],
    }

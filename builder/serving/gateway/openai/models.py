"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any

from builder.serving.gateway.call import Call
from builder.serving.gateway.models import Model

CREATED = 0  # config.pbtxt does not state the build time, and OpenAI's clients need a number


async def list_models(call: Call) -> dict[str, Any]:
    """List every available model."""
    return {"object": "list", "data": [describe(model) for model in await call.gateway.models.all()]}


async def show_model(call: Call) -> dict[str, Any]:
    """Describe one model. Raises ApiError 404."""
    return describe(await call.gateway.models.get(call.path["name"]))


def describe(model: Model) -> dict[str, Any]:
    """Return OpenAI's object with additional fields for the page and for scripts."""
    return {
        "id": model.name,
        "object": "model",
        "created": CREATED,
        "owned_by": "build-repo",
        "max_model_len": model.max_total_tokens or model.max_input_length,
        "task": model.task,
        "version": model.version,
        "chat": model.chats,
        "embeds": model.embeds,
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

"""Admin route that starts, renews or ends a canary."""

from __future__ import annotations

from typing import Any

from builder.serving.gateway.call import Call
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.errors import ApiError


async def order(call: Call) -> dict[str, Any]:
    """Serve POST /admin/canary: share a model's requests with a candidate for a while. Raises ApiError."""
    models = call.gateway.models
    if not isinstance(models, Catalogue):
        raise ApiError(501, "this gateway loads and unloads models itself, and takes no canaries")
    if call.body.share:
        await models.candidate(call.body.candidate, call.body.model)
    return call.gateway.triton.order(call.body)

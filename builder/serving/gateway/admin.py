"""Serve the admin route, which starts, renews or ends a canary."""

from __future__ import annotations

from typing import Any

from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError


async def set_canary(context: RequestContext) -> dict[str, Any]:
    """Serve POST /admin/canary: share a model's requests with a candidate for a while. Raises ApiError."""
    models = context.gateway.models
    if not isinstance(models, Catalogue):
        raise ApiError(501, "canaries are not available with models loaded on demand")
    if context.body.share:
        await models.require_candidate(context.body.candidate, context.body.model)
    return context.gateway.triton.set_canary(context.body)

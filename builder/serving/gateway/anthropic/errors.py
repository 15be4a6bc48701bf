"""Format errors in Anthropic's shape.

Source: https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builder.serving.gateway.errors import ApiError

KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}

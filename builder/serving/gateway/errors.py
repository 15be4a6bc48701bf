"""Define the errors of the API: a status and OpenAI's error object.

Source of the shape: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    501: "not_implemented_error",
    502: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Refusal of a request. `param`: the invalid field. `retry_after`: seconds after which a retry may succeed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}


def bad_field(name: str, message: str) -> ApiError:
    """Return an ApiError 400 for the field `name`."""
    return ApiError(400, message, param=name)


def queue_full(reason: str, retry_after: float = 1) -> ApiError:
    """Return an ApiError 429 for a request beyond a limit of waiting ones."""
    message = f"{reason}, which is the limit; send this one again later"
    return ApiError(429, message, code="queue_full", retry_after=retry_after)


def unavailable(message: str, retry_after: float | None = 2) -> ApiError:
    """Return an ApiError 503 for a server or model that cannot answer now."""
    return ApiError(503, message, code="unavailable", retry_after=retry_after)

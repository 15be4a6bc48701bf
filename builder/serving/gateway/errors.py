"""Define the errors of the API: a status, and a body in the shape of OpenAI, Anthropic or Text Embeddings Inference.

Sources: https://platform.openai.com/docs/guides/error-codes, https://docs.anthropic.com/en/api/errors and
https://huggingface.github.io/text-embeddings-inference
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TEI_TYPES: Mapping[int, str] = {
    400: "Validation",
    404: "Validation",
    413: "Validation",
    429: "Overloaded",
    503: "Unhealthy",
}


class ApiError(Exception):
    """Refusal of a request. `param`: the invalid field. `retry_after`: seconds after which a retry may succeed.

    `shape`: the shape of its body if a route answers in several; None for the route's own.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        shape: ErrorBody | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.shape = retry_after, shape

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}


class ServerUnreachable(ApiError):
    """ApiError 503 of a server that does not answer at all, unlike one of its models."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="unavailable", retry_after=2)


ErrorBody = Callable[[ApiError], Mapping[str, Any]]


def openai_error(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error in OpenAI's shape."""
    kind = OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error in Anthropic's shape."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def tei_error(error: ApiError) -> Mapping[str, Any]:
    """Return the JSON body of an error in TEI's shape."""
    return {"error": error.message, "error_type": TEI_TYPES.get(error.status, "Backend")}


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

"""Record a request and its answer so far, for the access log and the metrics."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from builder.serving.gateway.errors import ApiError

RECORD = "builder.serving.gateway.request_record"  # key of the ASGI scope


@dataclass
class RequestRecord:
    """Fields of the access log and the metrics. The tokens count towards the limit of the request's key."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    method: str = ""
    path: str = ""
    client: str = ""
    key: str = ""
    model: str = ""
    limited_model: str = ""  # model whose requests are limited
    status: int = 0
    error: str = ""
    started: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def has_response(self) -> bool:
        """True once the response has started; AccessLog records its status."""
        return self.status != 0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def fail(self, error: ApiError) -> None:
        """Record why an answer broke off after it had started."""
        self.set_error(error)
        self.status = error.status

    def set_error(self, error: ApiError) -> None:
        """Record why there is no answer: the message of a server error; for a bad request its field, not the value."""
        self.error = error.message if error.status >= 500 else error.code or error.param or "refused"

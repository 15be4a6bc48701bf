"""Provide the outermost middleware: request ids, access log, metrics, and draining before the gateway stops."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from builder.serving.gateway.context import RECORD, RequestRecord
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.http_responses import send_error
from builder.serving.gateway.metrics import Metrics

REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")
UNDRAINED_PATHS = ("/health", "/metrics")  # answered even while the gateway stops


class AccessLog:
    """ASGI middleware. `active` counts the requests in progress; while `draining` is set, new requests are refused."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: TextIO | None = sys.stdout) -> None:
        self.app, self.metrics, self.log = app, metrics, log
        self.active = 0
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord(scope["method"], scope["path"], (scope.get("client") or ("",))[0])
        sent_id = dict(scope["headers"]).get(b"x-request-id", b"")
        if REQUEST_ID.fullmatch(sent_id):
            record.id = sent_id.decode()
        request_id = record.id.encode()

        async def recording(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        if self.draining and record.path not in UNDRAINED_PATHS:
            error = ApiError(503, "this gateway is stopping; ask another, or again in a moment", retry_after=5)
            await send_error(recording, error, headers={"connection": "close"})
            return
        self.active += 1
        try:
            await self.app(scope, receive, recording)
        finally:
            self.active -= 1
            route = getattr(scope.get("route"), "path", None) or record.path if "endpoint" in scope else "other"
            self.metrics.responses.labels(route, record.status).inc()
            self.metrics.finish(record)
            if self.log is not None:
                print(json.dumps(_line(record), ensure_ascii=False), file=self.log, flush=True)


def _line(record: RequestRecord) -> dict[str, Any]:
    """Return a line of the access log: client, request, times and token counts, but no content."""
    line: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": record.id,
        "client": record.client,
        "key": record.key,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "ms": round(record.elapsed_s * 1000, 2),
    }
    if record.model:
        line |= {"model": record.model, "prompt_tokens": record.prompt_tokens}
    if record.first_token_s is not None:
        line |= {"first_token_ms": round(record.first_token_s * 1000, 2), "completion_tokens": record.completion_tokens}
    if record.error:
        line["error"] = record.error
    return line

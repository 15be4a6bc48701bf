"""Outermost middleware: request ids, access log, metrics, and draining before the gateway stops."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.facts import FACTS, Facts
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.responses import send_json

REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")
ALWAYS = ("/health", "/metrics")  # answered even while the gateway stops


class Journal:
    """ASGI middleware. `active` counts the requests in progress; while `draining` is set, new requests are refused."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: TextIO | None = sys.stdout) -> None:
        self.app, self.metrics, self.log = app, metrics, log
        self.active = 0
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        facts = scope[FACTS] = _facts(scope)
        name = facts.id.encode()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            await send(message)

        if self.draining and facts.path not in ALWAYS:
            error = ApiError(503, "this gateway is stopping; ask another, or again in a moment", retry_after=5)
            await send_json(noting, error.status, error.body, {**error.headers, "connection": "close"})
            return
        self.active += 1
        try:
            await self.app(scope, receive, noting)
        finally:
            self.active -= 1
            self._end(scope, facts)

    def _end(self, scope: Scope, facts: Facts) -> None:
        route = getattr(scope.get("route"), "path", None) or facts.path if "endpoint" in scope else "other"
        self.metrics.responses.labels(route, facts.status).inc()
        self.metrics.finish(facts)
        if self.log is not None:
            print(json.dumps(_line(facts), ensure_ascii=False), file=self.log, flush=True)


def _facts(scope: Scope) -> Facts:
    facts = Facts(method=scope["method"], path=scope["path"], client=(scope.get("client") or ("",))[0])
    request_id = dict(scope["headers"]).get(b"x-request-id", b"")
    if REQUEST_ID.fullmatch(request_id):
        facts.id = request_id.decode()
    return facts


def _line(facts: Facts) -> dict[str, Any]:
    """Return a line of the access log: client, request, times and token counts, but no content."""
    line: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": facts.id,
        "client": facts.client,
        "key": facts.key,
        "method": facts.method,
        "path": facts.path,
        "status": facts.status,
        "ms": round(facts.elapsed_s * 1000, 2),
    }
    if facts.model:
        line |= {"model": facts.model, "prompt_tokens": facts.prompt_tokens}
    if facts.first_token_s is not None:
        line |= {"first_token_ms": round(facts.first_token_s * 1000, 2), "completion_tokens": facts.completion_tokens}
    if facts.error:
        line["error"] = facts.error
    return line

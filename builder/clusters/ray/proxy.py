"""Extend Ray's HTTP proxy with middleware that sends a request to another gateway if its gateway died.

The proxy itself gives up: its application returns without a response, and its server answers 500 (ray/serve/_private/
http_util.py, send_http_response_on_exception). It takes middleware from the function that the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, on every node, before Ray starts there.
"""

from __future__ import annotations

import asyncio

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from builder.serving.gateway.errors import ApiError, openai_error
from builder.serving.gateway.http_responses import event, send_error

RETRY_DELAYS_S = (0.1, 0.3, 1.0, 3.0)  # pause before each retry
MAX_REPLAY_BYTES = 16 << 20  # bytes of a body: a larger one is sent only once
GATEWAY_GONE = "the gateway that had this request is gone; send it again"


def middlewares() -> list[Middleware]:
    """Return the middleware that Ray's proxy puts around its application."""
    return [Middleware(RetryMiddleware)]


class ReplayableBody:
    """A client's messages, which can be read again from the beginning."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.messages: list[Message] = []
        self.size = 0

    @property
    def is_replayable(self) -> bool:
        """True if the whole body so far is kept, and the client still waits for the answer."""
        return self.size <= MAX_REPLAY_BYTES and all(message["type"] == "http.request" for message in self.messages)

    def reader(self) -> Receive:
        """Return an ASGI `receive` that starts at the beginning."""
        before = list(self.messages)

        async def receive() -> Message:
            if before:
                return before.pop(0)
            message = await self.receive()
            self.size += len(message.get("body", b""))
            if self.size <= MAX_REPLAY_BYTES or message["type"] != "http.request":
                self.messages.append(message)
            return message

        return receive


class ResponseTracker:
    """Progress of a response."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.started = self.ended = self.is_event_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.is_event_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        await self.send(message)


class RetryMiddleware:
    """ASGI middleware that retries when the application returns without a response because its gateway died."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, tracker = ReplayableBody(receive), ResponseTracker(send)
        for pause in (*RETRY_DELAYS_S, None):
            await self.app({**scope, "headers": list(scope["headers"])}, body.reader(), tracker)
            if tracker.started or not body.is_replayable or pause is None:
                break
            await asyncio.sleep(pause)
        if tracker.is_event_stream and not tracker.ended:
            await send({"type": "http.response.body", "body": event(openai_error(_gone()))})
        elif not tracker.started:
            await send_error(send, _gone())


def _gone() -> ApiError:
    return ApiError(503, GATEWAY_GONE, code="unavailable", retry_after=2)

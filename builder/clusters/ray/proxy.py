"""Extend Ray's HTTP proxy with middleware that sends a request to another gateway if its gateway died.

The proxy itself gives up: its application returns without a response, and its server answers 500 (ray/serve/_private/
http_util.py, send_http_response_on_exception). It takes middleware from the function that the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, on every node, before Ray starts there.
"""

from __future__ import annotations

import asyncio

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.http_responses import event, send_json

AGAIN_S = (0.1, 0.3, 1.0, 3.0)  # pause before each retry
MOST_KEPT = 16 << 20  # bytes of a body: a larger one is sent only once
GONE = "the gateway that had this request is gone; send it again"


def middlewares() -> list[Middleware]:
    """Return the middleware that Ray's proxy puts around its application."""
    return [Middleware(AskAgain)]


class Kept:
    """A client's messages, kept so that they can be read again from the beginning."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.messages: list[Message] = []
        self.size = 0

    @property
    def again(self) -> bool:
        """True if the whole body so far is kept, and the client still waits for the answer."""
        return self.size <= MOST_KEPT and all(message["type"] == "http.request" for message in self.messages)

    def reader(self) -> Receive:
        """Return an ASGI `receive` that starts at the beginning."""
        before = list(self.messages)

        async def receive() -> Message:
            if before:
                return before.pop(0)
            message = await self.receive()
            self.size += len(message.get("body", b""))
            if self.size <= MOST_KEPT or message["type"] != "http.request":
                self.messages.append(message)
            return message

        return receive


class Response:
    """Progress of a response."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.begun = self.ended = self.events = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self.events = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        await self.send(message)


class AskAgain:
    """ASGI middleware that retries when the application returns without a response because its gateway died."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, response = Kept(receive), Response(send)
        for pause in (*AGAIN_S, None):
            await self.app({**scope, "headers": list(scope["headers"])}, body.reader(), response)
            if response.begun or not body.again or pause is None:
                break
            await asyncio.sleep(pause)
        if response.events and not response.ended:
            await send({"type": "http.response.body", "body": event(_gone().body)})
        elif not response.begun:
            await send_json(send, 503, _gone().body, _gone().headers)


def _gone() -> ApiError:
    return ApiError(503, GONE, code="unavailable", retry_after=2)

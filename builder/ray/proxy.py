"""Middleware of Ray's HTTP proxy: a request whose gateway died is asked again of another gateway.

The proxy itself gives up: its application returns without a response, and its server answers 500 (ray/serve/_private/
http_util.py, send_http_response_on_exception). It takes middleware from the function that the environment variable
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names, on every node, before Ray starts there.
"""

from __future__ import annotations

import asyncio

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from builder.gateway.errors import ApiError
from builder.gateway.responses import event, send_json

AGAIN_S = (0.1, 0.3, 1.0, 3.0)  # before each time that a request is asked again
MOST_KEPT = 16 << 20  # bytes of a body: a larger one is asked once
GONE = "the gateway that had this request is gone; send it again"


def middlewares() -> list[Middleware]:
    """What Ray's proxy puts around its application."""
    return [Middleware(AskAgain)]


class Kept:
    """What a client sends, from its beginning as often as it is wanted."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.messages: list[Message] = []
        self.size = 0

    @property
    def again(self) -> bool:
        """Whether it is here from its beginning, and somebody waits for the answer."""
        return self.size <= MOST_KEPT and all(message["type"] == "http.request" for message in self.messages)

    def reader(self) -> Receive:
        """An ASGI `receive` that begins at the beginning."""
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
    """How far a response has come."""

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
    """ASGI middleware around an application that returns without a response where what it asked has died."""

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

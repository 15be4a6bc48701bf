"""Request to an ASGI application without a network, whose client may disconnect."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Answer:
    """Response: the status, the headers, and the body in the pieces in which it was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.pieces))

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Return the data of server-sent events; the last is [DONE] as it stands."""
        lines = b"".join(self.pieces).decode().split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


async def ask(
    app: ASGIApp,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    method: str | None = None,
    disconnect_after: int | None = None,
) -> Answer:
    """Send `body`, JSON unless bytes, and read the answer; disconnect after `disconnect_after` pieces (0: at once)."""
    all_headers = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "method": method or ("GET" if body is None else "POST"),
        "path": path,
        "root_path": "",
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
    }
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer, sent, disconnected = Answer(), False, asyncio.Event()
    if disconnect_after == 0:
        disconnected.set()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["body"]:
            answer.pieces.append(message["body"])
            if disconnect_after is not None and len(answer.pieces) >= disconnect_after:
                disconnected.set()

    await app(scope, receive, send)
    return answer

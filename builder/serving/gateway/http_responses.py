"""Write responses, as JSON or as server-sent events, in plain ASGI, and read JSON.

Source of the events' format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Send

from builder.serving.gateway.errors import ApiError, ErrorBody, openai_error

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class RawResponse:
    """An answer that is not JSON."""

    content: bytes
    media_type: str
    headers: Mapping[str, str] | None = None


def dumps(value: Any) -> str:
    """Return compact JSON on one line. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """Parse standard JSON; all of it can be written again. Raises ValueError and RecursionError."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def event(value: Any) -> bytes:
    """Return one event with `value` as its data."""
    return f"data: {dumps(value)}\n\n".encode()


def named_event(value: Mapping[str, Any]) -> bytes:
    """Return one event that is named by the type of its data."""
    return f"event: {value['type']}\n".encode() + event(value)


def to_json(value: Any) -> bytes:
    """Return the JSON of a whole response. Numpy arrays keep their own precision and are not converted to lists."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # lone surrogates and numbers beyond 64 bits, from a request
        return dumps(value).encode("utf-8", "replace")


async def send_json(send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole response as JSON."""
    await send_bytes(send, status, to_json(value), "application/json", headers)


async def send_error(
    send: Send, error: ApiError, shape: ErrorBody = openai_error, headers: Mapping[str, str] | None = None
) -> None:
    """Send an error in a shape, with its own headers and `headers`."""
    await send_json(send, error.status, (error.shape or shape)(error), {**error.headers, **(headers or {})})


async def send_bytes(
    send: Send, status: int, content: bytes, media_type: str, headers: Mapping[str, str] | None
) -> None:
    """Send a whole response."""
    fields = {"content-type": media_type, "content-length": str(len(content)), **(headers or {})}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(fields)})
    await send({"type": "http.response.body", "body": content})


async def send_stream(send: Send, events: AsyncIterator[bytes]) -> None:
    """Send a stream of events. It starts with the first event, so an earlier failure can become an error response."""
    first = await anext(events, None)
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})
    if first is not None:
        await send({"type": "http.response.body", "body": first, "more_body": True})
    async for data in events:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

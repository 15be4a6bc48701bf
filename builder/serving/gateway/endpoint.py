"""Serve one route: read and validate a body, answer, and stop when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from builder.serving.gateway.context import RECORD, GatewayState, RequestContext, RequestRecord
from builder.serving.gateway.errors import ApiError, ErrorBody, openai_error
from builder.serving.gateway.http_responses import (
    RawResponse,
    event,
    loads,
    named_event,
    send_bytes,
    send_error,
    send_json,
    send_stream,
)
from builder.serving.gateway.validation import validate_body

Handler = Callable[[RequestContext], Awaitable[Any]]
TRACE_HEADERS = (b"traceparent", b"tracestate")
CLIENT_CLOSED_REQUEST = 499  # nginx logs this status if the client disconnected


class ClientDisconnected(Exception):
    """The client disconnected before its answer was complete."""


class Endpoint:
    """An ASGI application for one route. `schema` is None for a route that takes no body."""

    def __init__(
        self,
        gateway: GatewayState,
        handler: Handler,
        schema: type[BaseModel] | None = None,
        error_body: ErrorBody = openai_error,
    ) -> None:
        self.gateway, self.handler, self.schema, self.error_body = gateway, handler, schema, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD]
        try:
            await self._answer(scope, receive, send, record)
        except ClientDisconnected:
            record.status = CLIENT_CLOSED_REQUEST
        except ApiError as error:
            record.set_error(error)
            await send_error(send, error, self.error_body)
        finally:
            if record.limited_model:
                self.gateway.running[record.limited_model] -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        settings = self.gateway.settings
        body = None
        if self.schema is not None:
            _refuse_media_type(scope)
            raw = await _read_body(scope, receive, settings.max_body, settings.body_timeout_s)
            body = validate_body(self.schema, _parsed(raw))
        forwarded = TRACE_HEADERS if settings.forward_traces else ()
        metadata = tuple((n.decode(), value.decode("latin-1")) for n, value in scope["headers"] if n in forwarded)
        context = RequestContext(self.gateway, record, body, scope.get("path_params", {}), metadata)
        try:
            async with asyncio.timeout(settings.timeout_s):
                await _run_until_disconnect(receive, self._respond(context, send))
        except (TimeoutError, ApiError) as reason:
            late = ApiError(504, f"no complete answer within {settings.timeout_s:g} s", code="timeout")
            error = reason if isinstance(reason, ApiError) else late
            if not record.has_response:
                raise error from reason
            record.fail(error)
            data = self.error_body(error)
            await send({"type": "http.response.body", "body": named_event(data) if "type" in data else event(data)})

    async def _respond(self, context: RequestContext, send: Send) -> None:
        answer = await self.handler(context)
        if isinstance(answer, AsyncGenerator):
            await send_stream(send, answer)
        elif isinstance(answer, RawResponse):
            await send_bytes(send, 200, answer.content, answer.media_type, answer.headers)
        else:
            await send_json(send, 200, answer)


async def _run_until_disconnect(receive: Receive, work: Any) -> None:
    """Run `work` to its end; if the client disconnects, cancel it and raise ClientDisconnected."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        task.result()
    finally:
        disconnected.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _refuse_media_type(scope: Scope) -> None:
    """Raise ApiError 415 unless the body is JSON.

    Pages of another origin can send other media types without a CORS preflight.
    """
    media_type = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"content-type is {media_type or 'missing'}; send JSON as application/json")


async def _read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise ApiError(413, f"the body is longer than {limit} bytes; send less at once")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s") from error


def _parsed(raw: bytes) -> Any:
    try:
        return loads(raw)
    except RecursionError as error:
        raise ApiError(400, "the body is JSON of too many levels") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error

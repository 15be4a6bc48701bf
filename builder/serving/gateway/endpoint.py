"""Endpoint of one route: reads and validates a body, answers, and stops when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from builder.runtime.fields import JSON_TYPES
from builder.serving.gateway.call import Call, Gateway
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.facts import FACTS, Facts
from builder.serving.gateway.responses import Plain, Stream, event, loads, send_bytes, send_json, send_stream
from builder.serving.gateway.validation import first_fault

Handler = Callable[[Call], Awaitable[Any]]
ErrorBody = Callable[[ApiError], Mapping[str, Any]]
CLOSED = 499  # nginx logs this status if the client disconnected


class ClientLeft(Exception):
    """The client disconnected before its answer was complete."""


def openai_error(error: ApiError) -> Mapping[str, Any]:
    """Return the body of an error in OpenAI's shape."""
    return error.body


class Endpoint:
    """An ASGI application for one route. `schema` is None for a route that takes no body."""

    def __init__(
        self,
        gateway: Gateway,
        handler: Handler,
        schema: type[BaseModel] | None = None,
        error_body: ErrorBody = openai_error,
    ) -> None:
        self.gateway, self.handler, self.schema, self.error_body = gateway, handler, schema, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts: Facts = scope[FACTS]
        try:
            await self._answer(scope, receive, send, facts)
        except ClientLeft:
            facts.status = CLOSED
        except ApiError as error:
            facts.refused(error)
            await send_json(send, error.status, self.error_body(error), error.headers)
        finally:
            if facts.waits_for:
                self.gateway.bound.leave(facts.waits_for)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, facts: Facts) -> None:
        settings = self.gateway.settings
        body = None
        if self.schema is not None:
            _refuse_media_type(scope)
            raw = await _read_body(scope, receive, settings.max_body, settings.body_timeout_s)
            body = checked(self.schema, _parsed(raw))
        traces = self.gateway.settings.forward_traces
        call = Call(self.gateway, facts, body, scope.get("path_params", {}), _metadata(scope) if traces else ())
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with asyncio.timeout(settings.timeout_s):
                await _while_there(receive, self._respond(call, sending))
        except TimeoutError as error:
            late = ApiError(504, f"no complete answer within {settings.timeout_s:g} s", code="timeout")
            if not started:
                raise late from error
            await self._break_off(send, facts, late)
        except ApiError as error:
            if not started:
                raise
            await self._break_off(send, facts, error)

    async def _respond(self, call: Call, send: Send) -> None:
        answer = await self.handler(call)
        if isinstance(answer, Stream):
            await send_stream(send, answer.events)
        elif isinstance(answer, Plain):
            await send_bytes(send, 200, answer.content, answer.media_type, answer.headers)
        else:
            await send_json(send, 200, answer)

    async def _break_off(self, send: Send, facts: Facts, error: ApiError) -> None:
        """Send the error as the last event of a stream that has begun."""
        facts.refused(error)
        facts.status = error.status
        await send({"type": "http.response.body", "body": event(self.error_body(error))})


async def _while_there(receive: Receive, work: Any) -> None:
    """Run `work` to its end; if the client disconnects, cancel it and raise ClientLeft."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        task.result()
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _metadata(scope: Scope) -> tuple[tuple[str, str], ...]:
    wanted = (b"traceparent", b"tracestate")
    return tuple((name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in wanted)


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
                    raise ClientLeft
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


def checked(schema: type[BaseModel], value: Any) -> BaseModel:
    """Return `value`, of JSON, as an instance of `schema`. Raises ApiError with the field that does not fit."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body has the JSON type {JSON_TYPES[type(value)]}; expected object")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise bad_field(*first_fault(error, value)) from error

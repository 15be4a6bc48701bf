"""Serve POST /v1/responses: a response, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.generation.answer import Delta
from builder.serving.gateway.generation.chat import PreparedChat, deltas, read_chat
from builder.serving.gateway.generation.generate import created_at
from builder.serving.gateway.http_responses import EventStream, named_event
from builder.serving.gateway.openai.responses.output import Event, Output
from builder.serving.gateway.openai.responses.request import ResponsesRequest, as_chat, by_own_name

INCOMPLETE = {"length": "max_output_tokens"}  # the model's finish reason -> OpenAI's


async def create_response(context: RequestContext) -> Any:
    """Answer an input, either whole or as a stream of events."""
    body: ResponsesRequest = context.body
    try:
        chat = await read_chat(context, as_chat(body))
        if body.stream:
            return EventStream(_events(chat, body))
        output, reason = Output(context.record.id), None
        async with aclosing(deltas(chat)) as stream:
            async for delta in stream:
                _add(output, delta)
                reason = delta.finish_reason or reason
    except ApiError as error:
        raise by_own_name(error) from error
    output.close(_status(reason))
    return _response(chat, body, output, reason)


async def _events(chat: PreparedChat, body: ResponsesRequest) -> AsyncGenerator[bytes, None]:
    """Yield the numbered events. The first comes with the model's first piece: an earlier refusal is not a stream."""
    output, numbers, reason = Output(chat.context.record.id), count(), None

    def written(event: Event) -> bytes:
        return named_event(event["type"], {**event, "sequence_number": next(numbers)})

    has_started = False
    try:
        async with aclosing(deltas(chat)) as stream:
            async for delta in stream:
                if not has_started:
                    has_started = True
                    for kind in ("created", "in_progress"):
                        yield written({"type": f"response.{kind}", "response": _response(chat, body, output, None)})
                for event in _add(output, delta):
                    yield written(event)
                reason = delta.finish_reason or reason
    except ApiError as error:
        if not has_started:
            raise by_own_name(error) from error
        chat.context.record.fail(error)
        failed = {**_response(chat, body, output, None), "status": "failed"}
        failed["error"] = {"code": "server_error", "message": error.message}
        yield written({"type": "response.failed", "response": failed})
        return
    for event in output.close(_status(reason)):
        yield written(event)
    yield written({"type": f"response.{_status(reason)}", "response": _response(chat, body, output, reason)})


def _add(output: Output, delta: Delta) -> list[Event]:
    return [event for part in delta.parts for event in output.push(part)]


def _status(reason: str | None) -> str:
    return "incomplete" if reason in INCOMPLETE else "completed"


def _response(chat: PreparedChat, body: ResponsesRequest, output: Output, reason: str | None) -> dict[str, Any]:
    """Return OpenAI's response object; `reason`: the finish reason, None while the answer is in progress."""
    usage = chat.usage
    return {
        "id": f"resp_{chat.context.record.id}",
        "object": "response",
        "created_at": created_at(chat.context),
        "completed_at": int(time.time()) if reason else None,
        "status": _status(reason) if reason else "in_progress",
        "error": None,
        "incomplete_details": {"reason": INCOMPLETE[reason]} if reason in INCOMPLETE else None,
        "model": chat.model.name,
        "output": output.items if reason else [],
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "text": body.text or {"format": {"type": "text"}},
        "reasoning": body.reasoning or {"effort": None, "summary": None},
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "metadata": (body.model_extra or {}).get("metadata") or {},
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},  # the model does not count them separately
            "total_tokens": usage.prompt + usage.completion,
        }
        if reason
        else None,
    }

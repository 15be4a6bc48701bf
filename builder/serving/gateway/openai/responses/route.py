"""The route /v1/responses: a response, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any

from builder.serving.gateway.call import Call
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.generation.answer import Delta
from builder.serving.gateway.generation.asking import began
from builder.serving.gateway.generation.chat import Chat, deltas, read_chat
from builder.serving.gateway.openai.responses.output import Event, Output
from builder.serving.gateway.openai.responses.request import Body, as_chat, by_own_name
from builder.serving.gateway.responses import Stream, named_event

CUT = {"length": "max_output_tokens"}  # the model's finish reason -> OpenAI's


async def respond(call: Call) -> Any:
    """Answer an input, either whole or as a stream of events."""
    body: Body = call.body
    try:
        asked = await read_chat(call, as_chat(body))
        if body.stream:
            return Stream(_events(asked, body))
        output, reason = Output(call.facts.id), None
        async with aclosing(deltas(asked)) as stream:
            async for delta in stream:
                _add(output, delta)
                reason = delta.finish_reason or reason
    except ApiError as error:
        raise by_own_name(error) from error
    output.close(_status(reason))
    return _response(asked, body, output, reason)


async def _events(asked: Chat, body: Body) -> AsyncGenerator[bytes, None]:
    """Yield the numbered events. The first comes with the model's first piece: an earlier refusal is not a stream."""
    output, numbers, reason = Output(asked.call.facts.id), count(), None

    def written(event: Event) -> bytes:
        return named_event(event["type"], {**event, "sequence_number": next(numbers)})

    begun = False
    try:
        async with aclosing(deltas(asked)) as stream:
            async for delta in stream:
                if not begun:
                    begun = True
                    for kind in ("created", "in_progress"):
                        yield written({"type": f"response.{kind}", "response": _response(asked, body, output, None)})
                for event in _add(output, delta):
                    yield written(event)
                reason = delta.finish_reason or reason
    except ApiError as error:
        if not begun:
            raise by_own_name(error) from error
        asked.call.facts.fail(error)
        failed = {**_response(asked, body, output, None), "status": "failed"}
        failed["error"] = {"code": "server_error", "message": error.message}
        yield written({"type": "response.failed", "response": failed})
        return
    for event in output.close(_status(reason)):
        yield written(event)
    yield written({"type": f"response.{_status(reason)}", "response": _response(asked, body, output, reason)})


def _add(output: Output, delta: Delta) -> list[Event]:
    return [event for part in delta.parts for event in output.push(part)]


def _status(reason: str | None) -> str:
    return "incomplete" if reason in CUT else "completed"


def _response(asked: Chat, body: Body, output: Output, reason: str | None) -> dict[str, Any]:
    """Return OpenAI's response object; `reason`: the finish reason, None while the answer is in progress."""
    usage = asked.usage
    return {
        "id": f"resp_{asked.call.facts.id}",
        "object": "response",
        "created_at": began(asked.call),
        "completed_at": int(time.time()) if reason else None,
        "status": _status(reason) if reason else "in_progress",
        "error": None,
        "incomplete_details": {"reason": CUT[reason]} if reason in CUT else None,
        "model": asked.model.name,
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

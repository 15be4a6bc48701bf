"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from builder.serving.gateway.anthropic.content import Content, Event
from builder.serving.gateway.anthropic.errors import anthropic_error
from builder.serving.gateway.anthropic.request import Body, CountBody, as_chat
from builder.serving.gateway.call import Call
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.generation.chat import Chat, deltas, read_chat
from builder.serving.gateway.responses import Stream, named_event
from builder.serving.gateway.tokenize import TOKENIZE, prompt_tokens

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # the model's -> Anthropic's


async def messages(call: Call) -> Any:
    """Answer a conversation, either whole or as a stream of events."""
    body: Body = call.body
    asked = await read_chat(call, as_chat(body, await call.gateway.models.get(body.model)))
    if body.stream:
        return Stream(_events(asked))
    content, reason = Content(), None
    async with aclosing(deltas(asked)) as stream:
        async for delta in stream:
            for part in delta.parts:
                content.push(part)
            reason = delta.finish_reason or reason
    return {**_message(asked, content), "stop_reason": REASONS.get(reason or "", reason), "usage": _usage(asked)}


async def count_tokens(call: Call) -> dict[str, int]:
    """Count the tokens of a conversation's prompt."""
    body: CountBody = call.body
    model = await call.gateway.models.get(body.model)
    asked = await read_chat(call, as_chat(body, model))
    if TOKENIZE not in model.inputs:
        raise bad_field("model", f"{model.name} was built before it could tell its tokens; build it again")
    return {"input_tokens": len((await prompt_tokens(call, model, dict(asked.inputs)))[1])}


async def _events(asked: Chat) -> AsyncGenerator[bytes, None]:
    """Yield the events. The first comes with the model's first piece, so an earlier refusal is not sent as a stream."""
    content, reason, begun = Content(), None, False
    try:
        async with aclosing(deltas(asked)) as stream:
            async for delta in stream:
                if not begun:
                    begun = True
                    yield _written({"type": "message_start", "message": _message(asked, content)})
                    yield _written({"type": "ping"})
                for part in delta.parts:
                    for event in content.push(part):
                        yield _written(event)
                reason = delta.finish_reason or reason
    except ApiError as error:
        if not begun:
            raise
        asked.call.facts.fail(error)
        yield named_event("error", anthropic_error(error))
        return
    for event in content.close():
        yield _written(event)
    ends = {"stop_reason": REASONS.get(reason or "", reason), "stop_sequence": None}
    yield _written({"type": "message_delta", "delta": ends, "usage": _usage(asked)})
    yield _written({"type": "message_stop"})


def _written(event: Event) -> bytes:
    return named_event(event["type"], event)


def _message(asked: Chat, content: Content) -> dict[str, Any]:
    return {
        "id": f"msg_{asked.call.facts.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model.name,
        "content": content.blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(asked),
    }


def _usage(asked: Chat) -> dict[str, int]:
    """Return the usage. Anthropic counts cached prompt tokens separately."""
    usage = asked.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }

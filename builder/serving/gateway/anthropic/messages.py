"""Serve POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from builder.serving.gateway.anthropic.content import Content, Event
from builder.serving.gateway.anthropic.errors import anthropic_error
from builder.serving.gateway.anthropic.request import CountTokensRequest, MessagesRequest, as_chat
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.generation.chat import PreparedChat, deltas, read_chat
from builder.serving.gateway.http_responses import EventStream, named_event
from builder.serving.gateway.tokenize import TOKENIZE, prompt_tokens

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # the model's -> Anthropic's


async def create_message(context: RequestContext) -> Any:
    """Answer a conversation, either whole or as a stream of events."""
    body: MessagesRequest = context.body
    chat = await read_chat(context, as_chat(body, await context.gateway.models.get(body.model)))
    if body.stream:
        return EventStream(_events(chat))
    content, reason = Content(), None
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            for part in delta.parts:
                content.push(part)
            reason = delta.finish_reason or reason
    return {**_message(chat, content), "stop_reason": REASONS.get(reason or "", reason), "usage": _usage(chat)}


async def count_tokens(context: RequestContext) -> dict[str, int]:
    """Count the tokens of a conversation's prompt."""
    body: CountTokensRequest = context.body
    model = await context.gateway.models.get(body.model)
    chat = await read_chat(context, as_chat(body, model))
    if TOKENIZE not in model.inputs:
        raise bad_field("model", f"{model.name} was built before it could tell its tokens; build it again")
    return {"input_tokens": len((await prompt_tokens(context, model, dict(chat.inputs)))[1])}


async def _events(chat: PreparedChat) -> AsyncGenerator[bytes, None]:
    """Yield the events. The first comes with the model's first piece, so an earlier refusal is not sent as a stream."""
    content, reason, has_started = Content(), None, False
    try:
        async with aclosing(deltas(chat)) as stream:
            async for delta in stream:
                if not has_started:
                    has_started = True
                    yield _written({"type": "message_start", "message": _message(chat, content)})
                    yield _written({"type": "ping"})
                for part in delta.parts:
                    for event in content.push(part):
                        yield _written(event)
                reason = delta.finish_reason or reason
    except ApiError as error:
        if not has_started:
            raise
        chat.context.record.fail(error)
        yield named_event("error", anthropic_error(error))
        return
    for event in content.close():
        yield _written(event)
    ends = {"stop_reason": REASONS.get(reason or "", reason), "stop_sequence": None}
    yield _written({"type": "message_delta", "delta": ends, "usage": _usage(chat)})
    yield _written({"type": "message_stop"})


def _written(event: Event) -> bytes:
    return named_event(event["type"], event)


def _message(chat: PreparedChat, content: Content) -> dict[str, Any]:
    return {
        "id": f"msg_{chat.context.record.id}",
        "type": "message",
        "role": "assistant",
        "model": chat.model.name,
        "content": content.blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(chat),
    }


def _usage(chat: PreparedChat) -> dict[str, int]:
    """Return the usage. Anthropic counts cached prompt tokens separately."""
    usage = chat.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }

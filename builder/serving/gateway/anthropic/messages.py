"""Serve POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from builder.serving.gateway.anthropic.request import CountTokensRequest, MessagesRequest, as_chat
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.answer import DeltaToolCall, Part, ReasoningText
from builder.serving.gateway.generation.chat import PreparedChat, deltas, read_chat
from builder.serving.gateway.http_responses import loads, named_event
from builder.serving.gateway.tokenize import TOKENIZE, prompt_tokens

Event = dict[str, Any]
SIGNED = {"thinking": {"signature": ""}}  # answers here are not signed
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # the model's -> Anthropic's


class Content:
    """Content blocks (thinking, text, tool calls), assembled as the parts arrive."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.kind = ""  # kind of the last block, while it is open

    def push(self, part: Part) -> list[Event]:
        """Return the events for one part of the answer."""
        if isinstance(part, DeltaToolCall):
            return [*self.close(), *self._call(part)]
        kind, text = ("thinking", part.text) if isinstance(part, ReasoningText) else ("text", part)
        if not text:
            return []
        events: list[Event] = []
        if kind != self.kind:
            events = [*self.close(), self._start({"type": kind, kind: "", **SIGNED.get(kind, {})})]
            self.kind = kind
        self.blocks[-1][kind] += text
        return [*events, self._event("delta", delta={"type": f"{kind}_delta", kind: text})]

    def close(self) -> list[Event]:
        """Close the open block and return its events."""
        events = [self._event("stop")] if self.kind else []
        self.kind = ""
        return events

    def _call(self, call: DeltaToolCall) -> list[Event]:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        events = [
            self._start({**block, "input": {}}),
            self._event("delta", delta={"type": "input_json_delta", "partial_json": call.arguments}),
            self._event("stop"),
        ]
        self.blocks[-1]["input"] = loads(call.arguments)
        return events

    def _start(self, block: dict[str, Any]) -> Event:
        self.blocks.append(block)
        return self._event("start", content_block=dict(block))

    def _event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self.blocks) - 1, **fields}


async def create_message(context: RequestContext) -> Any:
    """Answer a conversation, either whole or as a stream of events."""
    body: MessagesRequest = context.body
    chat = await read_chat(context, as_chat(body, await context.gateway.models.get(body.model)))
    if body.stream:
        return _events(chat)
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
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            if not has_started:
                has_started = True
                yield named_event({"type": "message_start", "message": _message(chat, content)})
                yield named_event({"type": "ping"})
            for part in delta.parts:
                for event in content.push(part):
                    yield named_event(event)
            reason = delta.finish_reason or reason
    for event in content.close():
        yield named_event(event)
    ends = {"stop_reason": REASONS.get(reason or "", reason), "stop_sequence": None}
    yield named_event({"type": "message_delta", "delta": ends, "usage": _usage(chat)})
    yield named_event({"type": "message_stop"})


def _message(chat: PreparedChat, content: Content) -> dict[str, Any]:
    return {
        "id": f"msg_{chat.context.record.id}",
        "type": "message",
        "role": "assistant",
        "model": chat.model.label,
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

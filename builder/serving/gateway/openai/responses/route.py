"""Serve POST /v1/responses: a response, whole or as events in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.generation.answer import Delta, DeltaToolCall, Part, ReasoningText
from builder.serving.gateway.generation.chat import PreparedChat, deltas, read_chat
from builder.serving.gateway.http_responses import named_event
from builder.serving.gateway.openai.responses.request import ResponsesRequest, as_chat, by_own_name

Event = dict[str, Any]  # without its sequence number
INCOMPLETE = {"length": "max_output_tokens"}  # the model's finish reason -> OpenAI's


class Output:
    """Output items (reasoning, text, tool calls), assembled as the parts arrive. Their ids contain `request`."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.items: list[dict[str, Any]] = []
        self.kind = ""  # kind of the last item, while it is open
        self.text = ""

    def push(self, part: Part) -> list[Event]:
        """Return the events for one part of the answer."""
        if isinstance(part, DeltaToolCall):
            return [*self.close(), *self._call(part)]
        kind, text = ("reasoning", part.text) if isinstance(part, ReasoningText) else ("message", part)
        if not text:
            return []
        events = [] if kind == self.kind else [*self.close(), *self._begin(kind)]
        self.text += text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"{self._name}.delta", content_index=0, delta=text, **more)]

    def close(self, status: str = "completed") -> list[Event]:
        """Close the open item and return its events."""
        if not self.kind:
            return []
        more: dict[str, Any] = {"logprobs": []} if self.kind == "message" else {}
        part = self._part(self.text)
        done = self._event(f"{self._name}.done", content_index=0, text=self.text, **more)
        self.items[-1] |= {"status": status, "content": [part]}
        events = [done, self._event("content_part.done", content_index=0, part=part), self._item("done")]
        self.kind = self.text = ""
        return events

    @property
    def _name(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def _begin(self, kind: str) -> list[Event]:
        self.kind = kind
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        self.items.append({"id": self._id(kind), "type": kind, "status": "in_progress", **own, "content": []})
        return [self._item("added"), self._event("content_part.added", content_index=0, part=self._part(""))]

    def _call(self, call: DeltaToolCall) -> list[Event]:
        item = {"id": self._id("call"), "type": "function_call", "call_id": call.id, "name": call.name}
        self.items.append({**item, "status": "in_progress", "arguments": ""})
        added = self._item("added")
        self.items[-1] |= {"status": "completed", "arguments": call.arguments}
        return [
            added,
            self._event("function_call_arguments.delta", delta=call.arguments),
            self._event("function_call_arguments.done", name=call.name, arguments=call.arguments),
            self._item("done"),
        ]

    def _id(self, kind: str) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "call": "fc"}[kind]
        return f"{prefix}_{self.request}_{len(self.items)}"

    def _part(self, text: str) -> dict[str, Any]:
        own: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self._name, "text": text, **own}

    def _item(self, what: str) -> Event:
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _event(self, name: str, /, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place, **fields}


async def create_response(context: RequestContext) -> Any:
    """Answer an input, either whole or as a stream of events."""
    body: ResponsesRequest = context.body
    try:
        chat = await read_chat(context, as_chat(body))
        if body.stream:
            return _events(chat, body)
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
        return named_event({**event, "sequence_number": next(numbers)})

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
        "created_at": chat.context.record.created_at,
        "completed_at": int(time.time()) if reason else None,
        "status": _status(reason) if reason else "in_progress",
        "error": None,
        "incomplete_details": {"reason": INCOMPLETE[reason]} if reason in INCOMPLETE else None,
        "model": chat.model.label,
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

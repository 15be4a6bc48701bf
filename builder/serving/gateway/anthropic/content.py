"""Assemble the content of an answer: its blocks and the events that stream them."""

from __future__ import annotations

from typing import Any

from builder.serving.gateway.generation.answer import DeltaToolCall, Part
from builder.serving.gateway.generation.reasoning import ReasoningText
from builder.serving.gateway.http_responses import loads

Event = dict[str, Any]


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
            events = [*self.close(), self._start({"type": kind, kind: "", **_SIGNED.get(kind, {})})]
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


_SIGNED = {"thinking": {"signature": ""}}  # answers here are not signed

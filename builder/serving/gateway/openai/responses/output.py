"""Assemble the output of a response: its items, and the events that stream them, in OpenAI's order."""

from __future__ import annotations

from typing import Any

from builder.serving.gateway.generation.answer import DeltaToolCall, Part
from builder.serving.gateway.generation.reasoning import ReasoningText

Event = dict[str, Any]  # without its sequence number


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

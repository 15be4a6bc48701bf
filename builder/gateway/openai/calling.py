"""An answer of a model that has tools: its text and its calls, whole or as chunks of a stream."""

from __future__ import annotations

from typing import Any

from builder.gateway.models import Model
from builder.gateway.openai.calls import call_body, reader_of
from builder.gateway.openai.guide import Calling
from builder.gateway.openai.pieces import Piece
from builder.gateway.tool_calls import Part, ToolCall


def demands_reading(body: Calling) -> bool:
    """Whether an answer may hold calls."""
    return bool(body.tools) and body.tool_choice != "none"


class Answer:
    """One of n answers. With `parallel_tool_calls: false` calls after the first are left out."""

    def __init__(self, model: Model, body: Calling, request: str, index: int) -> None:
        self.reader = reader_of(model, body.tool_choice)()
        self.most = 1 if body.parallel_tool_calls is False else None
        self.request, self.index = request, index
        self.calls: list[dict[str, Any]] = []
        self.last: Part = ""
        self.begun = False
        self.logprobs: list[dict[str, Any]] | None = None  # of tokens whose text is held back

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What all of an answer says, and its calls."""
        deltas = self._deltas(text, ended=True)
        return "".join(delta.get("content", "") for delta in deltas), self.calls

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices that a piece becomes, their log-probabilities as they came; none where all of it is held back."""
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        deltas = self._deltas(piece.text, ended=piece.finish_reason is not None)
        if not self.begun:
            self.begun = True
            deltas = [{"role": "assistant", **(deltas[0] if deltas else {"content": ""})}, *deltas[1:]]
        elif piece.finish_reason and not deltas:
            deltas = [{}]
        chunks: list[dict[str, Any]] = [
            {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if chunks:
            chunks[-1] |= {"logprobs": self.logprobs, "finish_reason": self.reason(piece.finish_reason)}
            self.logprobs = None
        return chunks

    def reason(self, finished: str | None) -> str | None:
        """Why it ended: for its calls, unless it was cut in the middle of something else."""
        whole = isinstance(self.last, ToolCall) or finished == "stop"
        return "tool_calls" if finished and self.calls and whole else finished

    def _deltas(self, text: str, ended: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in self.reader.push(text) + (self.reader.finish() if ended else []):
            self.last = part
            if isinstance(part, str):
                deltas.append({"content": part})
            elif self.most is None or len(self.calls) < self.most:
                body = call_body(part, self.request, self.index, len(self.calls))
                deltas.append({"tool_calls": [{"index": len(self.calls), **body}]})
                self.calls.append(body)
        return deltas

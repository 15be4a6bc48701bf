"""Parse a chat's answer as it arrives: reasoning, text and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builder.checkpoints.tool_calls import ToolCall
from builder.serving.gateway.generation.pieces import Piece
from builder.serving.gateway.generation.reasoning import ReasoningMarks, ReasoningParser, ReasoningText
from builder.serving.gateway.generation.tool_calling import ToolCallParser


@dataclass(frozen=True)
class DeltaToolCall:
    """Tool call `number` of an answer; `arguments` is a JSON object, as text."""

    number: int
    id: str
    name: str
    arguments: str


Part = str | ReasoningText | DeltaToolCall


@dataclass(frozen=True)
class Delta:
    """Addition of one piece to the answer `index`. An answer that is only text has one part in each delta."""

    index: int
    parts: list[Part]
    logprobs: list[dict[str, Any]] | None
    finish_reason: str | None


class AnswerParser:
    """One of n answers to the request named `request`. Without `marks` and `tool_parser` all of it is text.

    `max_calls`: maximum number of calls; later ones are dropped.
    """

    def __init__(
        self,
        request: str,
        index: int,
        marks: ReasoningMarks | None,
        tool_parser: Callable[[], ToolCallParser] | None,
        max_calls: int | None,
    ) -> None:
        self.request, self.index, self.max_calls = request, index, max_calls
        self.reasoning = None if marks is None else ReasoningParser(marks)
        self.tool_parser = None if tool_parser is None else tool_parser()
        self.calls = 0
        self.ends_with_call = False

    def push(self, piece: Piece) -> Delta:
        """Parse one piece; return its addition to the answer."""
        has_ended = piece.finish_reason is not None
        texts: list[ReasoningText | str] = [piece.text]
        if self.reasoning is not None:
            self.reasoning.opened = self.reasoning.opened or piece.thinking
            texts = self.reasoning.push(piece.text, last=has_ended)
        parser, parts = self.tool_parser, list[Part]()
        for text in texts:
            if parser is None or isinstance(text, ReasoningText):
                parts.append(text)
            else:
                parts += self._number_calls(parser.push(text))
        if parser is not None and has_ended:
            parts += self._number_calls(parser.finish())
        return Delta(self.index, parts, piece.logprobs, self._reason(piece.finish_reason))

    def _number_calls(self, parsed: list[str | ToolCall]) -> list[Part]:
        """Return the parts, each call with number and id: nine hexadecimal digits, as Mistral's templates require."""
        parts: list[Part] = []
        for part in parsed:
            self.ends_with_call = isinstance(part, ToolCall)
            if isinstance(part, str):
                parts.append(part)
            elif self.max_calls is None or self.calls < self.max_calls:
                seed = (part, self.request, self.index, self.calls)
                identity = hashlib.sha256(repr(seed).encode()).hexdigest()[:9]
                parts.append(DeltaToolCall(self.calls, identity, part.name, part.arguments))
                self.calls += 1
        return parts

    def _reason(self, finished: str | None) -> str | None:
        """Return the finish reason: tool_calls if there are calls, unless the answer was cut in other text."""
        is_complete = self.ends_with_call or finished == "stop"
        return "tool_calls" if finished and self.calls and is_complete else finished

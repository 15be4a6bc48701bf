"""Parse a chat's answer as it arrives: reasoning, text and tool calls.

The build writes the marks around a checkpoint's reasoning, such as <think> and </think>, to config.pbtxt. Only the
beginning of an answer can be reasoning; marks further on are text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builder.checkpoints.tool_calls import ToolCall
from builder.serving.gateway.generation.generate import Piece
from builder.serving.gateway.generation.tool_calling import ToolCallParser
from builder.serving.gateway.http_responses import loads
from builder.serving.gateway.served_model import ServedModel

PARAMETER = "thinking"


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks around a model's reasoning.

    `special`: the marks are special tokens, which the text includes only on request. `switch`: an effort turns
    reasoning on and off.
    """

    begin: str
    end: str
    special: bool
    switch: bool = False


@dataclass(frozen=True)
class ReasoningText:
    text: str


def reasoning_marks(model: ServedModel) -> ReasoningMarks | None:
    """Return the marks around the reasoning of `model`; None if the model declares none."""
    marks = model.parameters.get(PARAMETER)
    return None if marks is None else ReasoningMarks(**loads(marks))


class ReasoningParser:
    """Splits one answer, as it arrives, into reasoning and the rest, without the line breaks next to the marks.

    `opened`: the prompt ends with the first mark, so the answer need not repeat it.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self.marks, self.opened = marks, False
        self.pending = ""
        self.has_begun = self.inside = self.at_edge = False

    def push(self, text: str, last: bool = False) -> list[ReasoningText | str]:
        """Return the parts that are certain so far; all of them after the `last` text."""
        self.pending += text
        parts: list[ReasoningText | str] = []
        if not self.has_begun:
            self._begin(last)
        if self.has_begun and self.inside:
            reasoning = self._take_reasoning(last)
            if reasoning:
                parts.append(ReasoningText(reasoning))
        if self.has_begun and not self.inside:
            answer, self.pending = self._trimmed(self.pending), ""
            if answer:
                parts.append(answer)
        return parts

    def _begin(self, last: bool) -> None:
        """Decide whether the answer begins with reasoning, as soon as that is certain."""
        begins = self.pending.lstrip()
        marked = begins.startswith(self.marks.begin)
        if not marked and not last and self.marks.begin.startswith(begins):
            return
        self.has_begun, self.inside = True, marked or self.opened
        self.at_edge = self.inside
        if marked:
            self.pending = begins[len(self.marks.begin) :]

    def _take_reasoning(self, last: bool) -> str:
        """Take reasoning from the pending text, up to the end mark or to text that may begin one."""
        place = self.pending.find(self.marks.end)
        if place >= 0:
            thought, self.pending = self.pending[:place].rstrip("\n"), self.pending[place + len(self.marks.end) :]
            thought = self._trimmed(thought)
            self.inside, self.at_edge = False, True
            return thought
        size = 0 if last else _overlap(self.pending, self.marks.end)
        shown = self.pending[: len(self.pending) - size].rstrip("\n")
        self.pending = self.pending[len(shown) :]
        return self._trimmed(shown)

    def _trimmed(self, text: str) -> str:
        """Return `text` without line breaks next to a mark."""
        if not self.at_edge:
            return text
        text = text.lstrip("\n")
        self.at_edge = not text
        return text


def _overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may begin `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


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
        reason = piece.finish_reason
        if has_ended and self.calls and (self.ends_with_call or reason == "stop"):  # else it was cut in other text
            reason = "tool_calls"
        return Delta(self.index, parts, piece.logprobs, reason)

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

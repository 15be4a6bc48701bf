"""A chat's answer, parsed as it arrives: reasoning, text and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builder.checkpoints.tool_calls import ToolCall
from builder.serving.gateway.generation.calls import Reader
from builder.serving.gateway.generation.pieces import Piece
from builder.serving.gateway.generation.reasoning import Marks, Thought, Thoughts


@dataclass(frozen=True)
class Called:
    """Tool call `number` of an answer; `arguments` is a JSON object, as text."""

    number: int
    id: str
    name: str
    arguments: str


Part = str | Thought | Called


@dataclass(frozen=True)
class Delta:
    """Addition of one piece to the answer `index`. An answer that is only text has one part in each delta."""

    index: int
    parts: list[Part]
    logprobs: list[dict[str, Any]] | None
    finish_reason: str | None


class Answer:
    """One of n answers to the request named `request`. Without `marks` and `reader` all of it is text.

    `most`: maximum number of calls; later ones are dropped.
    """

    def __init__(
        self, request: str, index: int, marks: Marks | None, reader: Callable[[], Reader] | None, most: int | None
    ) -> None:
        self.request, self.index, self.most = request, index, most
        self.thoughts = None if marks is None else Thoughts(marks)
        self.reader = None if reader is None else reader()
        self.calls = 0
        self.ends_with_call = False

    def push(self, piece: Piece) -> Delta:
        """Return what `piece` adds."""
        ended = piece.finish_reason is not None
        texts: list[Thought | str] = [piece.text]
        if self.thoughts is not None:
            self.thoughts.opened = self.thoughts.opened or piece.thinking
            texts = self.thoughts.push(piece.text, last=ended)
        parts: list[Part] = []
        for text in texts:
            parts += [text] if self.reader is None or isinstance(text, Thought) else self._read(self.reader, text)
        if self.reader is not None and ended:
            parts += self._counted(self.reader.finish())
        return Delta(self.index, parts, piece.logprobs, self._reason(piece.finish_reason))

    def _read(self, reader: Reader, text: str) -> list[Part]:
        return self._counted(reader.push(text))

    def _counted(self, read: list[str | ToolCall]) -> list[Part]:
        """Return the parts, each call with number and id: nine hexadecimal digits, as Mistral's templates require."""
        parts: list[Part] = []
        for part in read:
            self.ends_with_call = isinstance(part, ToolCall)
            if isinstance(part, str):
                parts.append(part)
            elif self.most is None or self.calls < self.most:
                made = (part, self.request, self.index, self.calls)
                identity = hashlib.sha256(repr(made).encode()).hexdigest()[:9]
                parts.append(Called(self.calls, identity, part.name, part.arguments))
                self.calls += 1
        return parts

    def _reason(self, finished: str | None) -> str | None:
        """Return the finish reason: tool_calls if there are calls, unless the answer was cut in other text."""
        whole = self.ends_with_call or finished == "stop"
        return "tool_calls" if finished and self.calls and whole else finished

"""Separate a model's reasoning, between marks such as <think> and </think>, from its answer.

The build writes a checkpoint's marks to config.pbtxt. Only the beginning of an answer can be reasoning; marks further
on are text.
"""

from __future__ import annotations

from dataclasses import dataclass

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

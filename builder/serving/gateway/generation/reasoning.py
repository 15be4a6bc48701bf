"""A model's reasoning before its answer, as text between two marks such as <think> and </think>.

The build writes a checkpoint's marks to config.pbtxt (checkpoint/thinking.py). Only the beginning of an answer can be
reasoning; marks further on are text.
"""

from __future__ import annotations

from dataclasses import dataclass

from builder.serving.gateway.models import Model
from builder.serving.gateway.responses import loads

PARAMETER = "thinking"


@dataclass(frozen=True)
class Marks:
    """Marks around a model's reasoning.

    `special`: the marks are special tokens, which the text includes only on request. `switch`: an effort turns
    reasoning on and off.
    """

    begin: str
    end: str
    special: bool
    switch: bool = False


@dataclass(frozen=True)
class Thought:
    """A piece of reasoning."""

    text: str


def marks_of(model: Model) -> Marks | None:
    """Return the marks around the reasoning of `model`; None for a model that is not known to reason."""
    noted = model.parameters.get(PARAMETER)
    return None if noted is None else Marks(**loads(noted))


class Thoughts:
    """Splits one answer, as it arrives, into reasoning and the rest, without the line breaks next to the marks.

    `opened`: the prompt ends with the first mark, so the answer need not repeat it.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks, self.opened = marks, False
        self.held = ""
        self.begun = self.inside = self.at_edge = False

    def push(self, text: str, last: bool = False) -> list[Thought | str]:
        """Return the parts that are certain so far; all of them after the `last` text."""
        self.held += text
        parts: list[Thought | str] = []
        if not self.begun:
            self._begin(last)
        if self.begun and self.inside:
            thought = self._thought(last)
            if thought:
                parts.append(Thought(thought))
        if self.begun and not self.inside:
            said, self.held = self._trimmed(self.held), ""
            if said:
                parts.append(said)
        return parts

    def _begin(self, last: bool) -> None:
        """Decide whether the answer begins with reasoning, as soon as that is certain."""
        begins = self.held.lstrip()
        marked = begins.startswith(self.marks.begin)
        if not marked and not last and self.marks.begin.startswith(begins):
            return
        self.begun, self.inside = True, marked or self.opened
        self.at_edge = self.inside
        if marked:
            self.held = begins[len(self.marks.begin) :]

    def _thought(self, last: bool) -> str:
        """Take reasoning from the held text, up to the end mark or to what may become one."""
        place = self.held.find(self.marks.end)
        if place >= 0:
            thought, self.held = self.held[:place].rstrip("\n"), self.held[place + len(self.marks.end) :]
            thought = self._trimmed(thought)
            self.inside, self.at_edge = False, True
            return thought
        size = 0 if last else _overlap(self.held, self.marks.end)
        shown = self.held[: len(self.held) - size].rstrip("\n")
        self.held = self.held[len(shown) :]
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

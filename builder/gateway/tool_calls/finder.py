"""Text as it comes, cut into what is said and what is called.

What may become a call is held back until it is one, whole, or cannot be one any more; then it is text like the rest.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

BRACKETS = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class ToolCall:
    """A call of the function `name`; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


Part = str | ToolCall


class NotACall(ValueError):
    """What began like a call is text."""


@dataclass(frozen=True)
class Reading:
    """What `length` characters turned out to be: calls, or, with none, text."""

    length: int
    calls: Sequence[ToolCall] = ()


class Extent:
    """How far a value in brackets reaches, found piece by piece; each character is looked at once."""

    def __init__(self, quotes: str) -> None:
        self.special = re.compile(rf"[\\{quotes}{{}}()\[\]]")
        self.quotes = quotes
        self.at = 0
        self.quote = ""
        self.open: list[str] = []
        self.closed: int | None = None

    def end(self, text: str) -> int | None:
        """The place after the bracket that closes the one `text` begins with; None where it is not there yet.

        Raises NotACall for brackets that do not match. `text` may grow between calls, and only at its end.
        """
        while self.closed is None and (match := self.special.search(text, self.at)) is not None:
            self.at = match.end()
            character = match[0]
            if character == "\\":
                self.at += 1  # whatever follows is not special
            elif self.quote:
                self.quote = "" if character == self.quote else self.quote
            elif character in self.quotes:
                self.quote = character
            elif character in BRACKETS:
                self.open.append(BRACKETS[character])
            elif self.open.pop() != character:
                raise NotACall
            elif not self.open:
                self.closed = self.at
        self.at = max(self.at, len(text))
        return self.closed


class Finder(ABC):
    """One answer. `begins`: what a call may begin with; `between`: characters between two calls that mean nothing."""

    begins: ClassVar[tuple[str, ...]]
    between: ClassVar[str] = " \t\r\n"
    quotes: ClassVar[str] = '"'

    def __init__(self) -> None:
        self.held = ""
        self.gap = ""  # what came after a call and says nothing yet
        self.after_call = False
        self.extent = Extent(self.quotes)

    @abstractmethod
    def read(self, text: str, last: bool) -> Reading | None:
        """What `text`, which starts with one of `begins`, starts with. None: more of it is needed.

        `last`: nothing follows, so that None means that it is not a call. Raises NotACall where that is known earlier.
        """

    def push(self, text: str) -> list[Part]:
        """What `text` settles: text that can be passed on, and calls that are whole."""
        self.held += text
        return self._settle(last=False)

    def finish(self) -> list[Part]:
        """What was held back, now that nothing follows."""
        return self._settle(last=True)

    def value(self, text: str) -> int | None:
        """Where the value in brackets ends that `text` starts with; see Extent.end."""
        return self.extent.end(text)

    def _settle(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self.held:
            start, whole = self._start(last)
            self._say(parts, start)
            if not whole:
                break
            reading = self._read(last)
            if reading is None:
                break
            self._take(parts, reading)
        return parts

    def _read(self, last: bool) -> Reading | None:
        try:
            reading = self.read(self.held, last)
        except NotACall:
            return Reading(next(len(begin) for begin in self.begins if self.held.startswith(begin)))
        return Reading(len(self.held)) if reading is None and last else reading

    def _take(self, parts: list[Part], reading: Reading) -> None:
        """Pass on what the held text begins with."""
        self.extent = Extent(self.quotes)
        if not reading.calls:
            self._pass_on(parts, reading.length)
            return
        parts.extend(reading.calls)
        self.held, self.gap, self.after_call = self.held[reading.length :], "", True

    def _say(self, parts: list[Part], length: int) -> None:
        """Pass on so much of what is held; what separates a call from the next, or from the end, is dropped."""
        if self.after_call and not self.held[:length].strip(self.between):
            self.gap, self.held = self.gap + self.held[:length], self.held[length:]
        else:
            self._pass_on(parts, length)

    def _pass_on(self, parts: list[Part], length: int) -> None:
        """So much of what is held is text, and what came before it since the last call is too."""
        text = self.gap + self.held[:length]
        if parts and isinstance(before := parts[-1], str):
            parts[-1] = before + text
        elif text:
            parts.append(text)
        self.held, self.gap, self.after_call = self.held[length:], "", False

    def _start(self, last: bool) -> tuple[int, bool]:
        """Where a call may begin, and whether its beginning is there as a whole."""
        places = [position for begin in self.begins if (position := self.held.find(begin)) >= 0]
        if places:
            return min(places), True
        if last:
            return len(self.held), False
        longest = max(map(len, self.begins)) - 1
        for position in range(max(0, len(self.held) - longest), len(self.held)):
            if any(begin.startswith(self.held[position:]) for begin in self.begins):
                return position, False
        return len(self.held), False


def object_call(value: Any, *names: str) -> ToolCall | None:
    """The call that a JSON value is whose arguments are under one of `names`; None for any other value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = [value[name] for name in names if name in value]
    return as_call(value["name"], arguments[0]) if len(arguments) == 1 else None


def as_call(name: str, arguments: Any) -> ToolCall | None:
    """A call; None where its arguments are not an object that JSON can write."""
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # not of half a character, which JSON can spell
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(name, text)


def parsed(text: str) -> Any:
    """`text` as JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

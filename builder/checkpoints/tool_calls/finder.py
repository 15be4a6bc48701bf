"""Splits text, as it arrives, into plain text and tool calls.

Text that may become a call is held back until it is a complete call, or cannot be one any more; then it is plain text.
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
    """Text that began like a call is not one."""


@dataclass(frozen=True)
class Reading:
    """Result for the first `length` characters: calls or, with none, text."""

    length: int
    calls: Sequence[ToolCall] = ()


class Extent:
    """Finds the end of a value in brackets, piece by piece; each character is examined once."""

    def __init__(self, quotes: str) -> None:
        self.special = re.compile(rf"[\\{quotes}{{}}()\[\]]")
        self.quotes = quotes
        self.at = 0
        self.quote = ""
        self.open: list[str] = []
        self.closed: int | None = None

    def end(self, text: str) -> int | None:
        """Return the place after the bracket that closes the first one of `text`; None if it is not there yet.

        Raises NotACall for brackets that do not match. `text` may grow between calls, but only at its end.
        """
        while self.closed is None and (match := self.special.search(text, self.at)) is not None:
            self.at = match.end()
            character = match[0]
            if character == "\\":
                self.at += 1  # the next character is escaped
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
    """Parser of one answer. `begins`: beginnings of a call; `between`: characters to ignore between two calls."""

    begins: ClassVar[tuple[str, ...]]
    between: ClassVar[str] = " \t\r\n"
    quotes: ClassVar[str] = '"'

    def __init__(self) -> None:
        self.held = ""
        self.gap = ""  # text after a call that has no meaning yet
        self.after_call = False
        self.extent = Extent(self.quotes)

    @abstractmethod
    def read(self, text: str, last: bool) -> Reading | None:
        """Return what `text`, which starts with one of `begins`, starts with; None if more of it is needed.

        `last`: nothing follows, so None then means that it is not a call. Raises NotACall if that is certain earlier.
        """

    def push(self, text: str) -> list[Part]:
        """Add `text` and return the parts that are certain now: text, and complete calls."""
        self.held += text
        return self._settle(last=False)

    def finish(self) -> list[Part]:
        """Return the parts that were held back, now that nothing follows."""
        return self._settle(last=True)

    def value(self, text: str) -> int | None:
        """Return the end of the value in brackets that `text` starts with; see Extent.end."""
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
        """Pass on the beginning of the held text."""
        self.extent = Extent(self.quotes)
        if not reading.calls:
            self._pass_on(parts, reading.length)
            return
        parts.extend(reading.calls)
        self.held, self.gap, self.after_call = self.held[reading.length :], "", True

    def _say(self, parts: list[Part], length: int) -> None:
        """Pass on `length` held characters; drop those between two calls, or between the last call and the end."""
        if self.after_call and not self.held[:length].strip(self.between):
            self.gap, self.held = self.gap + self.held[:length], self.held[length:]
        else:
            self._pass_on(parts, length)

    def _pass_on(self, parts: list[Part], length: int) -> None:
        """Pass on `length` held characters as text, after the gap since the last call."""
        text = self.gap + self.held[:length]
        if parts and isinstance(before := parts[-1], str):
            parts[-1] = before + text
        elif text:
            parts.append(text)
        self.held, self.gap, self.after_call = self.held[length:], "", False

    def _start(self, last: bool) -> tuple[int, bool]:
        """Return where a call may begin, and whether its beginning is complete."""
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
    """Return the call in a JSON value with its arguments under one of `names`; None for any other value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = [value[name] for name in names if name in value]
    return as_call(value["name"], arguments[0]) if len(arguments) == 1 else None


def as_call(name: str, arguments: Any) -> ToolCall | None:
    """Return a call; None if its arguments are not an object that JSON can represent."""
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for lone surrogates, which JSON can spell
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(name, text)


def parsed(text: str) -> Any:
    """Return `text` parsed as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

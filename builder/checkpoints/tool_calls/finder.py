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
    """Parser of one answer, in the notation that a subclass describes.

    `begins`: beginnings of a call, marks or the first characters of its value; `end`: the mark after a call, which
    models may omit; `between`: characters to ignore between two calls; `quotes`: those around a text of a value.
    """

    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str] = ""
    between: ClassVar[str] = " \t\r\n"
    quotes: ClassVar[str] = '"'

    def __init__(self) -> None:
        self.held = ""
        self.gap = ""  # text after a call that has no meaning yet
        self.after_call = False
        self.extent = Extent(self.quotes)

    @abstractmethod
    def value_start(self, body: str) -> int | None:
        """Return where the value in brackets starts in `body`, the text after a mark; None if more of it is needed.

        Raises NotACall if it certainly is not a call.
        """

    @abstractmethod
    def calls(self, head: str, value: str) -> Sequence[ToolCall | None]:
        """Return the calls in `value`, the text in brackets after `head`; None for an entry that is not a call."""

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Add `text` and return the parts that are certain now: text, and complete calls. `last`: nothing follows."""
        self.held += text
        parts: list[Part] = []
        while self.held:
            start, is_begun = self._start(last)
            if self.after_call and not self.held[:start].strip(self.between):
                self.gap, self.held = self.gap + self.held[:start], self.held[start:]
            else:
                self._pass_on(parts, start)
            reading = self._read(last) if is_begun else None
            if reading is None:
                break
            self.extent = Extent(self.quotes)
            if reading.calls:
                parts.extend(reading.calls)
                self.held, self.gap, self.after_call = self.held[reading.length :], "", True
            else:
                self._pass_on(parts, reading.length)
        return parts

    def finish(self) -> list[Part]:
        """Return the parts that were held back, now that nothing follows."""
        return self.push("", last=True)

    def _start(self, last: bool) -> tuple[int, bool]:
        """Return where a call may begin, and True if its beginning is complete."""
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

    def _read(self, last: bool) -> Reading | None:
        """Return what the held text, which starts with one of `begins`, starts with; None if more of it is needed."""
        begin = next(begin for begin in self.begins if self.held.startswith(begin))
        try:
            reading = self._read_call("" if begin in BRACKETS else begin, last)
        except NotACall:
            return Reading(len(begin))
        return Reading(len(self.held)) if reading is None and last else reading

    def _read_call(self, mark: str, last: bool) -> Reading | None:
        body = self.held[len(mark) :].lstrip()
        start = self.value_start(body) if body else None
        length = None if start is None else self.extent.end(body[start:])
        if start is None or length is None:
            return None
        calls = self.calls(body[:start], body[start : start + length])
        found = tuple(call for call in calls if call is not None)
        found = found if len(found) == len(calls) else ()
        rest = body[start + length :]
        if found and mark and self.end:
            if rest.lstrip().startswith(self.end):
                rest = rest.lstrip()[len(self.end) :]
            elif not last and self.end.startswith(rest.lstrip()):
                return None
        return Reading(len(self.held) - len(rest), found)

    def _pass_on(self, parts: list[Part], length: int) -> None:
        """Pass on `length` held characters as text, after the gap since the last call."""
        text = self.gap + self.held[:length]
        if parts and isinstance(before := parts[-1], str):
            parts[-1] = before + text
        elif text:
            parts.append(text)
        self.held, self.gap, self.after_call = self.held[length:], "", False


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

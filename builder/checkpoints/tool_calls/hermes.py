"""Parser of Hermes' notation, which Qwen 2.5 and 3 also use.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from typing import ClassVar

from builder.checkpoints.tool_calls.finder import Finder, NotACall, Reading, object_call, parsed

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Finder):
    """Hermes' calls. A model may omit the last end mark."""

    begins: ClassVar[tuple[str, ...]] = (BEGIN,)

    def read(self, text: str, last: bool) -> Reading | None:
        body = text[len(BEGIN) :].lstrip()
        if not body:
            return None
        if body[0] != "{":
            raise NotACall
        begin = len(text) - len(body)
        length = self.value(body)
        if length is None:
            return None
        call = object_call(parsed(body[:length]), "arguments")
        if call is None:
            return Reading(begin + length)
        rest = body[length:].lstrip()
        if rest.startswith(END):
            return Reading(len(text) - len(rest) + len(END), (call,))
        if not last and END.startswith(rest):
            return None
        return Reading(begin + length, (call,))

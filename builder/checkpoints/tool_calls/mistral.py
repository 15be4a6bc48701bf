"""Parser of Mistral's notations.

They are [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] and, since tokenizer 11, [TOOL_CALLS]NAME[ARGS]{...} for
each call.

Source: https://docs.mistral.ai/guides/tokenization, and the chat templates of the checkpoints
"""

from __future__ import annotations

import re
from typing import ClassVar

from builder.checkpoints.tool_calls.finder import Finder, NotACall, Reading, ToolCall, as_call, object_call, parsed

BEGIN = "[TOOL_CALLS]"
LONGEST_HEAD = 256  # characters between the mark and the arguments
HEAD = re.compile(r"(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


class Mistral(Finder):
    begins: ClassVar[tuple[str, ...]] = (BEGIN,)

    def read(self, text: str, last: bool) -> Reading | None:
        body = text[len(BEGIN) :].lstrip()
        start = 0 if body.startswith("[") else body.find("{")
        if max(start, len(body) if start < 0 else 0) > LONGEST_HEAD:
            raise NotACall
        if start < 0:
            return None
        head, value = body[:start], body[start:]
        match = HEAD.fullmatch(head)
        if head and match is None:
            raise NotACall
        length = self.value(value)
        if length is None:
            return None
        return Reading(len(text) - len(value) + length, _calls(match["name"] if match else "", value[:length]))


def _calls(name: str, text: str) -> tuple[ToolCall, ...]:
    """Return the calls in a value: of `name`, or with their own names; none if any entry is not a call."""
    value = parsed(text)
    if name:
        calls = [as_call(name, value)]
    else:
        calls = [object_call(entry, "arguments") for entry in (value if isinstance(value, list) else [value])]
    return () if None in calls else tuple(call for call in calls if call is not None)

"""Parser of Llama 3's JSON notation: {"name": ..., "parameters": {...}}, several separated by semicolons.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from builder.checkpoints.tool_calls.finder import Finder, NotACall, ToolCall, object_call, parsed

KEYS = ("name", "parameters", "arguments", "type")
FIRST_KEY = re.compile(r'\{\s*(?:"(?P<key>[^"]*)(?P<whole>"?))?')


class Llama3Json(Finder):
    """Llama 3's calls. Some models omit the tag before a call; some write arguments in place of parameters."""

    begins = ("<|python_tag|>", "{")
    between = " \t\r\n;"

    def value_start(self, body: str) -> int:
        """Return 0 unless the object cannot be a call: other braces are not held back to their end."""
        match = FIRST_KEY.match(body)
        if match is None:
            raise NotACall
        key = match["key"]
        if key is None:
            may_be_call = match.end() == len(body)
        elif match["whole"]:
            may_be_call = key in KEYS
        else:
            may_be_call = any(known.startswith(key) for known in KEYS)
        if not may_be_call:
            raise NotACall
        return 0

    def calls(self, head: str, value: str) -> Sequence[ToolCall | None]:
        return [object_call(parsed(value), "parameters", "arguments")]

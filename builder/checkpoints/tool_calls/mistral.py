"""Parser of Mistral's notations.

They are [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] and, since tokenizer 11, [TOOL_CALLS]NAME[ARGS]{...} for
each call.

Source: https://docs.mistral.ai/guides/tokenization, and the chat templates of the checkpoints
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from builder.checkpoints.tool_calls.finder import Finder, NotACall, ToolCall, as_call, object_call, parsed

MAX_HEAD_LENGTH = 256  # characters between the mark and the arguments
HEAD = re.compile(r"(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


class Mistral(Finder):
    begins = ("[TOOL_CALLS]",)

    def value_start(self, body: str) -> int | None:
        start = 0 if body.startswith("[") else body.find("{")
        if max(start, len(body) if start < 0 else 0) > MAX_HEAD_LENGTH:
            raise NotACall
        if start > 0 and HEAD.fullmatch(body[:start]) is None:
            raise NotACall
        return None if start < 0 else start

    def calls(self, head: str, value: str) -> Sequence[ToolCall | None]:
        content = parsed(value)
        if match := HEAD.fullmatch(head):
            return [as_call(match["name"], content)]
        return [object_call(entry, "arguments") for entry in (content if isinstance(content, list) else [content])]

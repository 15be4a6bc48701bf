"""Parser of Hermes' notation, which Qwen 2.5 and 3 also use.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from collections.abc import Sequence

from builder.checkpoints.tool_calls.finder import Finder, NotACall, ToolCall, object_call, parsed


class Hermes(Finder):
    """Hermes' calls. A model may omit the last end mark."""

    begins = ("<tool_call>",)
    end = "</tool_call>"

    def value_start(self, body: str) -> int:
        if body[0] != "{":
            raise NotACall
        return 0

    def calls(self, head: str, value: str) -> Sequence[ToolCall | None]:
        return [object_call(parsed(value), "arguments")]

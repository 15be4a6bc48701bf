"""Parser of Llama 3's JSON notation: {"name": ..., "parameters": {...}}, several separated by semicolons.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
"""

from __future__ import annotations

import re
from typing import ClassVar

from builder.checkpoints.tool_calls.finder import Finder, NotACall, Reading, object_call, parsed

TAG = "<|python_tag|>"
KEYS = ("name", "parameters", "arguments", "type")
FIRST_KEY = re.compile(r'\{\s*(?:"(?P<key>[^"]*)(?P<whole>"?))?')


class Llama3Json(Finder):
    """Llama 3's calls. Some models omit the tag before a call; some write arguments in place of parameters."""

    begins: ClassVar[tuple[str, ...]] = (TAG, "{")
    between: ClassVar[str] = " \t\r\n;"

    def read(self, text: str, last: bool) -> Reading | None:
        mark = len(TAG) if text.startswith(TAG) else 0
        body = text[mark:].lstrip()
        if not body:
            return None
        if not _may_be_call(body):
            raise NotACall
        length = self.value(body)
        if length is None:
            return None
        call = object_call(parsed(body[:length]), "parameters", "arguments")
        return Reading(len(text) - len(body) + length, () if call is None else (call,))


def _may_be_call(body: str) -> bool:
    """Return True if the object that begins here may be a call, so that other braces are not held back to their end."""
    match = FIRST_KEY.match(body)
    if match is None:
        return False
    key = match["key"]
    if key is None:
        return match.end() == len(body)
    return key in KEYS if match["whole"] else any(known.startswith(key) for known in KEYS)

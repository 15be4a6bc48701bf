"""Chats, tools and calls that a build renders to learn what a chat template supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
USER = {"role": "user", "content": " What is the capital of Iceland? <b>é</b> "}
ASSISTANT = {"role": "assistant", "content": "Reykjavík."}
CHATS: dict[str, Messages] = {
    "a question": [USER],
    "a system message": [{"role": "system", "content": "Be brief."}, USER],
    "an answer and another question": [USER, ASSISTANT, {"role": "user", "content": "And of Norway?"}],
    "a last message of the assistant": [USER, ASSISTANT],
    "a message in parts": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
}
PLACE = {"type": "string", "description": "a city, such as Oslo"}
SCHEMA = {"type": "object", "properties": {"place": PLACE}, "required": ["place"]}
WEATHER = {"name": "weather", "description": "The weather of a place", "parameters": SCHEMA}
TOOLS: Sequence[Mapping[str, Any]] = [{"type": "function", "function": WEATHER}]
PARTS = ("first text", "second text")
UNREAD = "unread key"  # of a part: shown by a template that writes a list as Python or JSON does
IN_PARTS = [{"type": "text", "text": text, UNREAD: UNREAD} for text in PARTS]
CALLED = {"name": "weather", "arguments": {"place": "Oslo"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]}
ID = "abcdef123"  # of nine letters and digits, which Mistral's templates require
CALL_WITH_ID = {**CALL, "tool_calls": [{"id": ID, "type": "function", "function": CALLED}]}
CONTEXTS: Sequence[tuple[str, Messages, Messages]] = (  # messages before and after one of each role
    ("system", (), (USER,)),
    ("user", (), ()),
    ("assistant", (USER,), (USER,)),
    ("tool", (USER, CALL), ()),
)

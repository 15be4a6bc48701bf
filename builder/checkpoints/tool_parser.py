"""Notation of a checkpoint's tool calls: its parser reads what its chat template renders."""

from __future__ import annotations

from builder.checkpoints.chat_template import ASSISTANT, TOOLS, USER, WEATHER, render, supports_tools
from builder.checkpoints.tool_calls import PARSERS, ToolCall
from builder.runtime.contract import Chat

ID = "abcdef123"  # of nine letters and digits, which Mistral's templates require
CALL = ToolCall(str(WEATHER["name"]), '{"place": "Oslo"}')
FUNCTION = {"name": CALL.name, "arguments": {"place": "Oslo"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": ID, "type": "function", "function": FUNCTION}]}


def tool_parser(chat: Chat) -> str | None:
    """Return the name of the parser of the template's notation; None if it has none, or an unknown one."""
    if not supports_tools(chat):
        return None
    written = _written(chat)
    return next((name for name in PARSERS if _reads(name, written)), None)


def _written(chat: Chat) -> str:
    """Return a rendered call, from where it differs from a text answer; empty if the template refuses calls."""
    (answered, _), (called, _) = render(chat, [([USER, ASSISTANT], TOOLS), ([USER, CALLING], TOOLS)])
    return "" if answered is None or called is None else called[_common_prefix(answered, called) :]


def _common_prefix(one: str, other: str) -> int:
    """Return the length of their common prefix, in characters."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), len(other))


def _reads(name: str, written: str) -> bool:
    """Return True if this parser finds the call, at the beginning, and no other."""
    parser = PARSERS[name]()
    parts = parser.push(written) + parser.finish()
    return parts[:1] == [CALL] and not any(isinstance(part, ToolCall) for part in parts[1:])

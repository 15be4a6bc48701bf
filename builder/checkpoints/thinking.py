"""Marks that a checkpoint writes around its reasoning, from its chat template."""

from __future__ import annotations

from collections.abc import Sequence

from builder.runtime.contract import Chat, Thinking
from builder.runtime.generation.chat import ChatTemplate

MARKS = (  # of Qwen 3, DeepSeek R1, GLM, SmolLM 3 and others; Magistral; Seed-OSS
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


def thinking(chat: Chat, special: Sequence[str]) -> Thinking | None:
    """Return the marks whose second one is in the template; None for a template without any.

    DeepSeek R1's has only the second, before which it cuts off earlier answers. `special`: tokens.
    """
    sources = f"{chat.template}{chat.tool_template or ''}"
    switch = bool(ChatTemplate(chat.template, chat.special_tokens, chat.tool_template).without_thinking)
    known = [Thinking(begin, end, end in special, switch) for begin, end in MARKS if end in sources]
    return known[0] if known else None

"""The marks that a checkpoint writes around its reasoning: those that its chat template knows.

Knows chat templates; knows no architecture and no task.
"""

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
    """Return the marks that the template has the second of; None for a template without any.

    DeepSeek R1's has the second alone, before which it cuts earlier answers off. `special`: tokens.
    """
    sources = f"{chat.template}{chat.tool_template or ''}"
    switch = bool(ChatTemplate(chat.template, chat.special_tokens, chat.tool_template).without_thinking)
    known = [Thinking(begin, end, end in special, switch) for begin, end in MARKS if end in sources]
    return known[0] if known else None

"""Chat template of a build: render it as the emitted code will, compare it with transformers, find its notations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from builder.checkpoints.chat_samples import (
    ASSISTANT,
    CALL_WITH_ID,
    CHATS,
    CONTEXTS,
    IN_PARTS,
    PARTS,
    TOOLS,
    UNREAD,
    USER,
    Messages,
)
from builder.checkpoints.tool_calls import PARSERS, ToolCall
from builder.common.errors import CheckpointError
from builder.common.limited import LimitReached, run_limited
from builder.runtime.contract import Chat, Thinking
from builder.runtime.generation.chat import ChatTemplate

PROBE = "builder.checkpoints.chat_probe:render"
SECONDS = 30  # of a processor, for the chats of one call; known templates take a hundredth of one
WHERE = "Mend or remove it: chat_template.jinja, or chat_template in tokenizer_config.json"
MARKS = (  # around reasoning, of Qwen 3, DeepSeek R1, GLM, SmolLM 3 and others; Magistral; Seed-OSS
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


def tool_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the template that transformers uses for requests with tools, if the checkpoint has one per purpose."""
    templates = tokenizer.chat_template
    return templates.get("tool_use") if isinstance(templates, dict) else None


def chat_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the template of a chat, or None.

    Raises CheckpointError if that, or the one for tools, is not rendered as transformers renders it.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):  # one for each purpose; transformers takes this one for a chat
        template = template.get("default")
    if not template:
        return None
    chats = {
        f"{name}{' with tools' if tools else ''}": (messages, tools)
        for tools in (None, TOOLS)
        for name, messages in CHATS.items()
    }
    chat = Chat(str(template), dict(tokenizer.special_tokens_map), tool_template(tokenizer))
    for name, (rendered, expected) in zip(chats, render(chat, list(chats.values()), compare=True), strict=True):
        if rendered != expected:
            raise CheckpointError(
                f"the checkpoint's chat template renders {name} differently here ({_show(rendered)}) and in "
                f"transformers ({_show(expected)}): a bug worth reporting, with the checkpoint's name. Without its "
                "chat_template, the model can be served for text_input"
            )
    return chat.template


def render(
    chat: Chat, chats: Sequence[tuple[Messages, Any]], compare: bool = False
) -> Sequence[tuple[str | None, str | None]]:
    """Return the prompts of messages with tools (None: without): the emitted code's and, to `compare`, transformers'.

    None if they are refused. Raises CheckpointError for a template that does not compile or reaches a limit.
    """
    answer = _probe(chat, chats, compare)
    if answer["problem"]:
        raise CheckpointError(f"{answer['problem']}. {WHERE}")
    return [(own, theirs) for own, theirs in answer["prompts"]]


def _probe(chat: Chat, chats: Sequence[tuple[Messages, Any]] = (), compare: bool = False) -> Mapping[str, Any]:
    request = {"template": chat.template, "tool_template": chat.tool_template, "tokens": dict(chat.special_tokens)}
    return _answer(json.dumps({**request, "chats": chats, "compare": compare}))


@lru_cache(maxsize=64)
def _answer(request: str) -> Mapping[str, Any]:
    try:
        answer: Mapping[str, Any] = run_limited(PROBE, json.loads(request), SECONDS)
    except LimitReached as error:
        raise CheckpointError(f"the model's chat template {error}, for chats of a few words. {WHERE}") from error
    if answer["limit"]:
        raise CheckpointError(f"the model's chat template refuses chats of a few words: {answer['limit']}. {WHERE}")
    return answer


def part_roles(chat: Chat) -> list[str]:
    """Return the roles whose messages in parts the template renders completely, with tools and without.

    Each is tried: Gemma 3's reads the first part alone of a system message, and others write a list as Python does.
    """
    chats = [
        ([*before, {"role": role, "content": IN_PARTS}, *after], tools)
        for role, before, after in CONTEXTS
        for tools in (None, TOOLS)
    ]
    is_read = [
        prompt is not None and all(text in prompt for text in PARTS) and UNREAD not in prompt
        for prompt, _ in render(chat, chats)
    ]
    return [role for at, (role, _, _) in enumerate(CONTEXTS) if all(is_read[2 * at : 2 * at + 2])]


def _show(text: str | None) -> str:
    return "refused" if text is None else repr(text if len(text) < 200 else f"{text[:200]}...")


def tool_parser(chat: Chat) -> str | None:
    """Return the name of the parser that reads the tool calls which the template renders.

    None if the template does not look at tools, or writes calls in an unknown notation.
    """
    if not _probe(chat)["supports_tools"]:
        return None
    (answered, _), (called, _) = render(chat, [([USER, ASSISTANT], TOOLS), ([USER, CALL_WITH_ID], TOOLS)])
    if answered is None or called is None:
        return None
    start = 0
    while start < min(len(answered), len(called)) and answered[start] == called[start]:
        start += 1
    for name, parser in PARSERS.items():
        reader = parser()
        first, *rest = [*reader.push(called[start:]), *reader.finish()] or [""]
        if first == ToolCall("weather", '{"place": "Oslo"}') and not any(isinstance(part, ToolCall) for part in rest):
            return name
    return None


def thinking(chat: Chat, special: Sequence[str]) -> Thinking | None:
    """Return the marks whose second one is in the template; None for a template without any.

    DeepSeek R1's has only the second, before which it cuts off earlier answers. `special`: tokens.
    """
    sources = f"{chat.template}{chat.tool_template or ''}"
    switch = bool(ChatTemplate(chat.template, chat.special_tokens, chat.tool_template).without_thinking)
    known = [Thinking(begin, end, end in special, switch) for begin, end in MARKS if end in sources]
    return known[0] if known else None

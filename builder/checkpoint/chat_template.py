"""The chat template that a build serves: compiled and rendered as it will be, and compared with transformers.

Knows tokenisers and messages; knows no architecture and no task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from builder.errors import CheckpointError
from builder.runtime.contract import Chat
from builder.runtime.fields import InputError
from builder.runtime.generation.chat import ChatTemplate

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
PLACES: Sequence[tuple[str, Messages, Messages]] = (  # of a message of each role, in a chat that has one
    ("system", (), (USER,)),
    ("user", (), ()),
    ("assistant", (USER,), (USER,)),
    ("tool", (USER, CALL), ()),
)


def tool_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The template that transformers takes for requests with tools, where the checkpoint has one for each purpose."""
    templates = tokenizer.chat_template
    return templates.get("tool_use") if isinstance(templates, dict) else None


def chat_template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The template of a chat, or None. Raises CheckpointError where that, or the one for tools, is not rendered as
    transformers renders it."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # one for each purpose; transformers takes this one for a chat
        template = template.get("default")
    if not template:
        return None
    own = ChatTemplate(template, tokenizer.special_tokens_map, tool_template(tokenizer))
    if own.problem:
        raise CheckpointError(
            f"{own.problem}. Mend or remove it: chat_template.jinja, or chat_template in tokenizer_config.json"
        )
    for tools in (None, TOOLS):
        for name, messages in CHATS.items():
            wanted, rendered = _transformers(tokenizer, messages, tools), _own(own, messages, tools)
            if wanted != rendered:
                raise CheckpointError(
                    f"the checkpoint's chat template renders {name}{' with tools' if tools else ''} differently here "
                    f"({_show(rendered)}) and in transformers ({_show(wanted)}): a bug worth reporting, with the "
                    "checkpoint's name. Without its chat_template, the model can be served for text_input"
                )
    return str(template)


def part_roles(chat: Chat) -> list[str]:
    """The roles whose messages in parts the template reads whole by itself, with tools and without.

    Each is tried: Gemma 3's reads the first part alone of a system message, and others write a list as Python does.
    """
    template = ChatTemplate(chat.template, chat.special_tokens, chat.tool_template)
    return [
        role
        for role, before, after in PLACES
        if all(
            _is_read(_own(template, [*before, {"role": role, "content": IN_PARTS}, *after], t)) for t in (None, TOOLS)
        )
    ]


def _is_read(prompt: str | None) -> bool:
    return prompt is not None and all(text in prompt for text in PARTS) and UNREAD not in prompt


def _transformers(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Any) -> str | None:
    """What transformers renders; None where the template refuses these messages."""
    try:
        options = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
        return str(tokenizer.apply_chat_template(list(messages), **options))
    except Exception:  # a template is a program: it may raise anything
        return None


def _own(template: ChatTemplate, messages: Messages, tools: Any) -> str | None:
    try:
        return template(messages, tools)
    except InputError:
        return None


def _show(text: str | None) -> str:
    return "refused" if text is None else repr(text if len(text) < 200 else f"{text[:200]}...")

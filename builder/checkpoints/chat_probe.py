"""Render chats through a checkpoint's template, as the emitted code does and as transformers does.

It runs in a process with limits (builder/common/limited.py): transformers' own renderer has none.
"""

from __future__ import annotations

from typing import Any

from builder.runtime.fields import InputError
from builder.runtime.generation.chat import ChatTemplate
from builder.runtime.generation.sandbox import LimitError


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Return the prompts of each chat of `request`: the emitted code's, and transformers' if `compare`; None: refused.

    `problem`: why the template does not compile; `limit`: which limit it reached; there are no prompts then.
    """
    own = ChatTemplate(request["template"], request["tokens"], request["tool_template"])
    answer: dict[str, Any] = {"problem": own.problem, "limit": "", "supports_tools": own.supports_tools, "prompts": []}
    if own.problem:
        return answer
    for messages, tools in request["chats"]:
        try:
            prompt = own(messages, tools)
        except InputError as error:
            if isinstance(error.__cause__, LimitError | MemoryError):
                return {**answer, "limit": str(error.__cause__) or "it takes too much memory", "prompts": []}
            prompt = None
        theirs = _transformers(request, messages, tools) if request["compare"] else None
        answer["prompts"].append((prompt, theirs))
    return answer


def _transformers(request: dict[str, Any], messages: Any, tools: Any) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second to import

    with_tools = request["tool_template"] if tools is not None else None
    template = request["template"] if with_tools is None else with_tools
    options = {"tools": tools, "chat_template": template, "add_generation_prompt": True}
    try:
        ((prompt,), _) = render_jinja_template([messages], **options, **request["tokens"])
    except MemoryError:
        raise
    except Exception:  # a template is a program: it may raise anything
        return None
    return str(prompt)

"""Render pairs of texts through a reranker's chat template with transformers, in a process with limits."""

from __future__ import annotations

from typing import Any


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Return the text of each chat of `request`; `problem`: why the template refuses one, and there is no text then.

    As PreTrainedTokenizerBase.apply_chat_template renders it (5.23): no generation prompt unless `variables` ask.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second to import

    chats = request["chats"]
    if request["structured"]:
        chats = [[{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat] for chat in chats]
    try:
        texts, _ = render_jinja_template(chats, chat_template=request["template"], **request["variables"])
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may raise anything
        return {"problem": f"{type(error).__name__}: {str(error)[:200]}", "texts": []}
    return {"problem": "", "texts": list(texts)}

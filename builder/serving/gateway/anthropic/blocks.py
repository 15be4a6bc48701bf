"""Convert messages of content blocks to chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.http_responses import dumps


def system_text(system: str | list[dict[str, Any]] | None) -> str | None:
    """Return the text of the system prompt. Raises ApiError for a block that is not text."""
    return "\n".join(_texts("system", system)) if isinstance(system, list) else system


def as_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat messages; each tool result becomes its own message. Raises ApiError for other blocks."""
    read: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if role not in ("user", "assistant"):
            raise bad_field("messages", f"the role of {where} is {role!r}; expected user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            read.append({"role": role, "content": content})
        elif content == []:
            raise bad_field("messages", f"{where} has no content; leave the message out")
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise bad_field("messages", f"the content of {where} is neither text nor a list of blocks")
        elif role == "user":
            read += _user_messages(where, content)
        else:
            read.append(_assistant_message(where, content))
    return read


def _user_messages(where: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content")
            text = "\n".join(_texts(where, content)) if isinstance(content, list) else content or ""
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            part = {"type": "text", "text": _texts(where, [block])[0]}
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"].append(part)
            else:
                messages.append({"role": "user", "content": [part]})
    return messages


def _assistant_message(where: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": dumps(block.get("input") or {})}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        else:
            message["content"] = (message["content"] or "") + _texts(where, [block])[0]
    return message


def _texts(where: str, blocks: list[Any]) -> list[str]:
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise bad_field("messages", f"{where} has a block of type {kind!r}; the models read text alone")
    return [block["text"] for block in blocks]

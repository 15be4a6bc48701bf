"""Convert the input of /v1/responses to chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from builder.serving.gateway.errors import bad_field

TEXTS = ("input_text", "output_text", "text")
Messages = list[dict[str, Any]]


def as_messages(given: str | list[dict[str, Any]], instructions: str | None) -> Messages:
    """Return the messages of a chat. Raises ApiError for an item that is neither a message nor about a function."""
    messages: Messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    reasoning = ""
    for number, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += "".join(_texts(number, item.get("content") or [], ("reasoning_text",)))
            continue
        if not isinstance(kind, str) or kind not in READERS:
            raise bad_field("input", f"input[{number}] is of type {kind!r}; expected one of {', '.join(READERS)}")
        READERS[kind](number, item, messages)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _message(number: int, item: Mapping[str, Any], messages: Messages) -> None:
    content = item.get("content")
    if isinstance(content, list):
        texts = _texts(number, content, TEXTS)
        content = "".join(texts) if item.get("role") == "assistant" else [{"type": "text", "text": t} for t in texts]
    messages.append({"role": item.get("role"), "content": content})


def _call(number: int, item: Mapping[str, Any], messages: Messages) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_output(number: int, item: Mapping[str, Any], messages: Messages) -> None:
    output = item.get("output")
    if isinstance(output, list):
        output = "".join(_texts(number, output, TEXTS))
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})


READERS: Mapping[str, Callable[[int, Mapping[str, Any], Messages], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
}


def _texts(number: int, parts: Any, kinds: tuple[str, ...]) -> list[str]:
    if not isinstance(parts, list):
        raise bad_field("input", f"the content of input[{number}] is neither text nor a list of parts")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise bad_field("input", f"input[{number}] has a part of type {kind!r}; the models read text alone")
    return [part["text"] for part in parts]

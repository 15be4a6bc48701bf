"""Convert a request of /v1/messages, with its messages of content blocks, to a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.answer import reasoning_marks
from builder.serving.gateway.generation.chat import MAX_MESSAGES, ChatCompletionRequest
from builder.serving.gateway.http_responses import dumps
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody, validate_body

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SWITCHED_ON = "medium"  # reasoning effort of a request that turns thinking on without an effort
HARMLESS = ("cache_control",)  # every prompt's prefix is cached anyway


def _as_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


class CountTokensRequest(ExtensibleBody):
    """Fields of a token count. Extra ones are options of the model, such as repetition_penalty; others are refused."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    stream: bool | None = None


def as_chat(body: CountTokensRequest, model: ServedModel) -> ChatCompletionRequest:
    """Return the request as a chat of `model`. Raises ApiError for features that the models here lack."""
    if "n" in (body.model_extra or {}):
        raise bad_field("n", "n is not a field of this route; an answer is one message")
    system = "\n".join(_texts("system", body.system)) if isinstance(body.system, list) else body.system
    messages = _as_messages(body.messages)
    config, choice = body.output_config or {}, body.tool_choice or {}
    fields: dict[str, Any] = {
        **{name: value for name, value in (body.model_extra or {}).items() if name not in HARMLESS},
        "model": body.model,
        "messages": [*([{"role": "system", "content": system}] if system else []), *messages],
        "continue_final_message": True if messages[-1]["role"] == "assistant" else None,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if body.tool_choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": _response_format(config),
        "reasoning_effort": config.get("effort") or _effort(body.thinking or {}, model),
    }
    if isinstance(body, MessagesRequest):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        fields |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    return validate_body(ChatCompletionRequest, {name: value for name, value in fields.items() if value is not None})


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_field("tools", f"a tool is of type {tool['type']!r}; expected custom: no others run here")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {own: tool[name] for name, own in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise bad_field("tool_choice", f"tool_choice.type is {kind!r}; expected one of {', '.join(CHOICES)}, tool")
    return CHOICES[kind]


def _response_format(config: Mapping[str, Any]) -> dict[str, Any] | None:
    form = config.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise bad_field("output_config", "the type of output_config.format is not json_schema")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _effort(thinking: Mapping[str, Any], model: ServedModel) -> str | None:
    """Return the effort that turns thinking on or off; None if the model's default already does that."""
    kind, marks = thinking.get("type"), reasoning_marks(model)
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise bad_field("thinking", f"thinking.type is {kind!r}; expected enabled, adaptive or disabled")
    if kind == "enabled" and marks is None:
        raise bad_field("thinking", f"{model.name} is not known to reason; leave thinking out")
    if kind == "disabled" and marks is not None and not marks.switch:
        raise bad_field("thinking", f"{model.name} reasons always: its chat template cannot turn it off")
    if kind in (None, "adaptive") or marks is None or not marks.switch:
        return None
    return SWITCHED_ON if kind == "enabled" else "none"

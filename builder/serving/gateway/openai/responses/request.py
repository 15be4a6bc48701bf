"""Convert a request of /v1/responses to a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.generation.chat import MAX_MESSAGES, ChatCompletionRequest
from builder.serving.gateway.validation import ExtensibleBody, validate_body

TEXTS = ("input_text", "output_text", "text")
CHAT_NAMES = {  # field of a chat -> field of this route
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
NOT_KEPT = "no response is stored here: send the whole conversation as input"
REFUSED = {  # field -> reason
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
    "prompt": "no prompts are stored here: send instructions and input",
    "background": "answers are not made in the background: stream them",
    "max_tool_calls": "only functions are called here, and the client runs them",
    "top_logprobs": "this route answers no log-probabilities: ask /v1/chat/completions",
    "context_management": NOT_KEPT,
    "n": "a response is one answer",
}
HARMLESS_INCLUDES = {"reasoning.encrypted_content"}  # reasoning is answered and accepted as text


def _as_messages(given: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises ApiError for an item that is neither a message nor about a function."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    reasoning = ""
    for number, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            content: Any = item.get("content")
            if isinstance(content, list):
                texts, is_answer = _texts(number, content, TEXTS), item.get("role") == "assistant"
                content = "".join(texts) if is_answer else [{"type": "text", "text": text} for text in texts]
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":  # belongs to the assistant's message before it, or to a new one
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            if isinstance(output, list):
                output = "".join(_texts(number, output, TEXTS))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            reasoning += "".join(_texts(number, item.get("content") or [], ("reasoning_text",)))
            continue
        else:
            kinds = "message, function_call, function_call_output"
            raise bad_field("input", f"input[{number}] is of type {kind!r}; expected one of {kinds}")
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def _texts(number: int, parts: Any, kinds: tuple[str, ...]) -> list[str]:
    if not isinstance(parts, list):
        raise bad_field("input", f"the content of input[{number}] is neither text nor a list of parts")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise bad_field("input", f"input[{number}] has a part of type {kind!r}; the models read text alone")
    return [part["text"] for part in parts]


class ResponsesRequest(ExtensibleBody):
    """Body of the route. Extra fields are those of a chat, such as top_k; others are refused by name."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """Return the request as a chat. Raises ApiError for fields that need stored state or an unsupported feature."""
    _refuse(body)
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in REFUSED}
    fields: dict[str, Any] = {
        **extra,
        "model": body.model,
        "messages": _as_messages(body.input, body.instructions),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text or {}),
        "reasoning_effort": _effort(body.reasoning or {}),
        "stream": body.stream,
    }
    if len(fields["messages"]) > MAX_MESSAGES:
        raise bad_field("input", f"input has {len(fields['messages'])} messages; send at most {MAX_MESSAGES}")
    try:
        return validate_body(
            ChatCompletionRequest, {name: value for name, value in fields.items() if value is not None}
        )
    except ApiError as error:
        raise by_own_name(error) from error


def by_own_name(error: ApiError) -> ApiError:
    """Return an error of a chat, with the invalid field by this route's name."""
    error.param = CHAT_NAMES.get(error.param or "", error.param)
    return error


def _refuse(body: ResponsesRequest) -> None:
    extra = body.model_extra or {}
    for name, reason in REFUSED.items():
        if extra.get(name):
            raise bad_field(name, f"{name}: {reason}")
    if body.store:
        raise bad_field("store", "store is true; no response is stored here: leave it out, or send false")
    if body.truncation not in (None, "disabled"):
        raise bad_field("truncation", f"truncation is {body.truncation!r}; expected disabled: send a shorter input")
    for name in set(body.include or []) - HARMLESS_INCLUDES:
        raise bad_field("include", f"include asks for {name}, which is not answered here; leave it out")
    for name, value in (body.stream_options or {}).items():
        if value:
            raise bad_field("stream_options", f"stream_options.{name} is not supported here; leave it out")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_field("tools", f"a tool is of type {tool.get('type')!r}; expected function: no others run here")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    if text.get("verbosity") not in (None, "medium"):
        raise bad_field("text", f"text.verbosity is {text['verbosity']!r}; models here have none: leave it out")
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in ("name", "schema") if name in form}}


def _effort(reasoning: Mapping[str, Any]) -> Any:
    if reasoning.get("summary") not in (None, "auto"):
        raise bad_field("reasoning", "reasoning.summary: reasoning is answered whole here, not summed up; leave it out")
    return reasoning.get("effort")

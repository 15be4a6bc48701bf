"""Run a chat with a model, for every API: its messages, the model's inputs, and its answers as they arrive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation import fields
from builder.serving.gateway.generation.answer import AnswerParser, Delta, DeltaToolCall, ReasoningText, reasoning_marks
from builder.serving.gateway.generation.fields import SKIP_SPECIAL_TOKENS, ToolFields, option_inputs
from builder.serving.gateway.generation.generate import TokenUsage, generate, refuse_other_tasks
from builder.serving.gateway.generation.tool_calling import tool_call_parser
from builder.serving.gateway.http_responses import dumps, loads
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody

MAX_MESSAGES = 4096


class Message(ExtensibleBody):
    """One message. Extra keys, such as name or reasoning_content, go to the template unchanged."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatTemplateFields(BaseModel):
    """Fields of a chat that control how its template is rendered."""

    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def refuse_prompts(self) -> None:
        """Raise ApiError unless the prompt ends where an answer begins, or within the message that it continues."""
        if self.add_generation_prompt is not None and self.add_generation_prompt is bool(self.continue_final_message):
            raise bad_field(
                "add_generation_prompt",
                "add_generation_prompt and continue_final_message are both "
                f"{str(self.add_generation_prompt).lower()}; expected one of them: an answer begins a message or "
                "continues the last one",
            )


def as_template(model: ServedModel, messages: Sequence[Message]) -> str:
    """Return the messages as JSON for the template of `model`. Raises ApiError for content that it cannot render."""
    return dumps([_as_template(number, message, model.part_roles) for number, message in enumerate(messages)])


def _as_template(number: int, message: Message, part_roles: Sequence[str]) -> dict[str, Any]:
    """Return one message: developer becomes system, and text parts are joined unless its role is in `part_roles`."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        texts = [_text(number, part) for part in content]
        content = content if role in part_roles else "\n".join(texts)
    rendered = {**(message.model_extra or {}), "role": role, "content": content}
    if message.tool_calls:
        rendered["tool_calls"] = [_earlier_call(at, call) for at, call in enumerate(message.tool_calls)]
    return rendered


def _text(number: int, part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        kind = part.get("type")
        raise bad_field("messages", f"messages[{number}] has a part of type {kind}; the models read text alone")
    return text


def _earlier_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer in the templates' form; OpenAI's clients send its arguments as text.

    Source: https://huggingface.co/docs/transformers/chat_extras
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise bad_field("messages", f"tool_calls[{number}] of a message has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise bad_field("messages", f"the arguments of tool_calls[{number}] are not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise bad_field("messages", f"the arguments of tool_calls[{number}] are not a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


class ChatCompletionRequest(fields.GenerationRequest, ToolFields, ChatTemplateFields):
    """Fields of a chat by OpenAI's names; the other APIs convert theirs to it."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def may_call(self) -> bool:
        """Return True if an answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class PreparedChat:
    """A chat that was read and validated. `usage` accumulates while the answers arrive."""

    context: RequestContext
    model: ServedModel
    body: ChatCompletionRequest
    inputs: Mapping[str, Any]
    usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass
class CompleteAnswer:
    """One of n complete answers."""

    text: str = ""
    reasoning: str = ""
    calls: list[DeltaToolCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        for part in delta.parts:
            if isinstance(part, str):
                self.text += part
            elif isinstance(part, ReasoningText):
                self.reasoning += part.text
            else:
                self.calls.append(part)
        self.logprobs += delta.logprobs or []
        self.finish_reason = delta.finish_reason or self.finish_reason


async def read_chat(context: RequestContext, body: ChatCompletionRequest) -> PreparedChat:
    """Return the chat with the inputs of its model. Raises ApiError for features that the model lacks."""
    model = await context.model(body.model)
    refuse_other_tasks(model)
    if not model.has_chat_template:
        raise bad_field("model", f"{model.name} has no chat template; send the prompt to /v1/completions")
    body.refuse_prompts()
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    marks = reasoning_marks(model)
    inputs: dict[str, Any] = {SKIP_SPECIAL_TOKENS: False} if marks is not None and marks.special else {}
    inputs |= {**option_inputs(model, body), "messages": as_template(model, body.messages)}
    if body.logprobs:
        inputs["logprobs"] = body.top_logprobs or 0
    if body.stream:
        inputs["stream"] = True
    return PreparedChat(context, model, body, inputs)


async def deltas(chat: PreparedChat) -> AsyncGenerator[Delta, None]:
    """Yield the answers as they arrive. Raises ApiError."""
    body, answers = chat.body, dict[int, AnswerParser]()
    marks = reasoning_marks(chat.model)
    parser = tool_call_parser(chat.model, body.tool_choice) if body.may_call else None
    max_calls = 1 if body.parallel_tool_calls is False else None
    async with aclosing(generate(chat.context, chat.model, chat.inputs)) as pieces:
        async for piece in pieces:
            chat.usage.add(piece)
            if piece.index not in answers:
                answers[piece.index] = AnswerParser(chat.context.record.id, piece.index, marks, parser, max_calls)
            yield answers[piece.index].push(piece)
    chat.context.record.prompt_tokens = chat.usage.prompt


async def complete_answers(chat: PreparedChat) -> list[CompleteAnswer]:
    """Return the complete answers. Raises ApiError."""
    answers: dict[int, CompleteAnswer] = {}
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            answers.setdefault(delta.index, CompleteAnswer()).add(delta)
    return [answer for _, answer in sorted(answers.items())]

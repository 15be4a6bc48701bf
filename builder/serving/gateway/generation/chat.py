"""One chat with a model, shared by every API: its fields, the model's inputs, and its answers as they arrive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from builder.serving.gateway.call import Call
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation import fields
from builder.serving.gateway.generation.answer import Answer, Called, Delta
from builder.serving.gateway.generation.asking import generate, refuse_other_models
from builder.serving.gateway.generation.calls import reader_of
from builder.serving.gateway.generation.fields import option_inputs
from builder.serving.gateway.generation.guide import MARKS, Calling
from builder.serving.gateway.generation.messages import MOST_MESSAGES, Message, Templated, as_template
from builder.serving.gateway.generation.pieces import Usage
from builder.serving.gateway.generation.reasoning import Thought, marks_of
from builder.serving.gateway.models import Model


class Body(fields.Body, Calling, Templated):
    """Fields of a chat by OpenAI's names; the other APIs convert theirs to it."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def may_call(self) -> bool:
        """Return True if an answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class Chat:
    """A chat that was read and validated. `usage` accumulates while the answers arrive."""

    call: Call
    model: Model
    body: Body
    inputs: Mapping[str, Any]
    usage: Usage = field(default_factory=Usage)


@dataclass
class Whole:
    """One of n complete answers."""

    text: str = ""
    reasoning: str = ""
    calls: list[Called] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        for part in delta.parts:
            if isinstance(part, str):
                self.text += part
            elif isinstance(part, Thought):
                self.reasoning += part.text
            else:
                self.calls.append(part)
        self.logprobs += delta.logprobs or []
        self.finish_reason = delta.finish_reason or self.finish_reason


async def read_chat(call: Call, body: Body) -> Chat:
    """Return the chat with the inputs of its model. Raises ApiError for what the model cannot do."""
    model = await call.model(body.model)
    refuse_other_models(model)
    if not model.chats:
        raise bad_field("model", f"{model.name} has no chat template; send the prompt to /v1/completions")
    body.refuse_prompts()
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    marks = marks_of(model)
    inputs: dict[str, Any] = {MARKS: False} if marks is not None and marks.special else {}
    inputs |= {**option_inputs(model, body), "messages": as_template(model, body.messages)}
    if body.logprobs:
        inputs["logprobs"] = body.top_logprobs or 0
    if body.stream:
        inputs["stream"] = True
    return Chat(call, model, body, inputs)


async def deltas(chat: Chat) -> AsyncGenerator[Delta, None]:
    """Yield the answers as they arrive. Raises ApiError."""
    body, answers = chat.body, dict[int, Answer]()
    marks = marks_of(chat.model)
    reader = reader_of(chat.model, body.tool_choice) if body.may_call else None
    most = 1 if body.parallel_tool_calls is False else None
    async with aclosing(generate(chat.call, chat.model, chat.inputs)) as pieces:
        async for piece in pieces:
            chat.usage.add(piece)
            if piece.index not in answers:
                answers[piece.index] = Answer(chat.call.facts.id, piece.index, marks, reader, most)
            yield answers[piece.index].push(piece)
    chat.call.facts.prompt_tokens = chat.usage.prompt


async def whole(chat: Chat) -> list[Whole]:
    """Return the complete answers. Raises ApiError."""
    answers: dict[int, Whole] = {}
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            answers.setdefault(delta.index, Whole()).add(delta)
    return [answer for _, answer in sorted(answers.items())]

"""POST /v1/chat/completions: messages through the model's own template, whole or as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from builder.gateway.call import Call
from builder.gateway.errors import bad_field
from builder.gateway.models import Model
from builder.gateway.openai import generation
from builder.gateway.openai.calls import read_call
from builder.gateway.openai.generation import IMPOSSIBLE, Piece, Usage, began, generate, option_inputs
from builder.gateway.openai.guide import Calling
from builder.gateway.responses import DONE, Stream, dumps, event

MOST_MESSAGES = 4096


class Message(BaseModel):
    """Further keys, such as name or reasoning_content, go to the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


class Body(generation.Body, Calling):
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


@dataclass
class Choice:
    """One of the n answers, put together."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs or []
        self.finish_reason = piece.finish_reason or self.finish_reason


async def chat(call: Call) -> Any:
    """A completion, or a stream of its chunks."""
    body: Body = call.body
    model = await call.model(body.model)
    generation.refuse_other_models(model)
    if not model.chats:
        raise bad_field("model", f"{model.name} has no chat template; send the prompt to /v1/completions")
    inputs = {**option_inputs(model, body), "messages": dumps([_message(i, m) for i, m in enumerate(body.messages)])}
    inputs |= _logprobs_input(body)
    if body.stream:
        inputs["stream"] = True
        return Stream((_call_events if "tools" in inputs else _events)(call, model, inputs, body))
    return await _whole(call, model, inputs)


def _logprobs_input(body: Body) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    return {"logprobs": body.top_logprobs or 0} if body.logprobs else {}


def _message(number: int, message: Message) -> dict[str, Any]:
    """A message as templates know it: its parts of text as one, and a developer as the system."""
    content = message.content
    if isinstance(content, list):
        texts = []
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise bad_field(
                    "messages", f"messages[{number}] has a part that is not text; the models read text alone"
                )
            texts.append(part["text"])
        content = "\n".join(texts)
    found = {**(message.model_extra or {}), "role": message.role, "content": content}
    return {**found, "role": "system"} if message.role == "developer" else found


async def _whole(call: Call, model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    choices: dict[int, Choice] = {}
    usage = Usage()
    async with aclosing(generate(call, model, inputs)) as pieces:
        async for piece in pieces:
            choices.setdefault(piece.index, Choice()).add(piece)
            usage.add(piece)
    call.facts.prompt_tokens = usage.prompt
    return {
        **_head(call, model, "chat.completion"),
        "choices": [_choice(call, index, choice, inputs) for index, choice in sorted(choices.items())],
        "usage": usage.body,
    }


def _choice(call: Call, index: int, choice: Choice, inputs: Mapping[str, Any]) -> dict[str, Any]:
    called = _called(call, index, choice) if "tools" in inputs else None
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if called:
        message |= {"content": None, "tool_calls": [called]}
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(choice.logprobs) if "logprobs" in inputs else None,
        "finish_reason": "tool_calls" if called else choice.finish_reason,
    }


def _called(call: Call, index: int, choice: Choice) -> dict[str, Any] | None:
    return read_call(choice.text, f"call_{call.facts.id}_{index}")


async def _call_events(call: Call, model: Model, inputs: Mapping[str, Any], body: Body) -> AsyncGenerator[bytes, None]:
    """A chunk for each answer that is a call, when it is whole: a part of one is of no use to who makes it."""
    usage = Usage()
    choices: dict[int, Choice] = {}
    head = _head(call, model, "chat.completion.chunk")
    async with aclosing(generate(call, model, inputs)) as pieces:
        async for piece in pieces:
            choice = choices.setdefault(piece.index, Choice())
            choice.add(piece)
            usage.add(piece)
            if choice.finish_reason is not None:
                made = _choice(call, piece.index, choice, inputs)
                delta = made.pop("message")
                delta["tool_calls"] = [{"index": 0, **called} for called in delta.get("tool_calls", [])]
                yield event({**head, "choices": [{**made, "delta": delta}]})
    call.facts.prompt_tokens = usage.prompt
    if body.usage_wanted:
        yield event({**head, "choices": [], "usage": usage.body})
    yield DONE


async def _events(call: Call, model: Model, inputs: Mapping[str, Any], body: Body) -> AsyncGenerator[bytes, None]:
    """Chunks. What all of them share is written once: a stream has one for each token."""
    usage, begun = Usage(), set()
    tail = ',"usage":null' if body.usage_wanted else ""
    head = f"data: {dumps(_head(call, model, 'chat.completion.chunk'))[:-1]}{tail}," + '"choices":[{"index":'
    async with aclosing(generate(call, model, inputs)) as pieces:
        async for piece in pieces:
            role = "" if piece.index in begun else '"role":"assistant",'
            begun.add(piece.index)
            logprobs = "null" if piece.logprobs is None else dumps(_logprobs(piece.logprobs))
            reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
            yield (
                f'{head}{piece.index},"delta":{{{role}"content":{dumps(piece.text)}}},"logprobs":{logprobs},'
                f'"finish_reason":{reason}}}]}}\n\n'
            ).encode()
            usage.add(piece)
    call.facts.prompt_tokens = usage.prompt
    if body.usage_wanted:
        yield event({**_head(call, model, "chat.completion.chunk"), "choices": [], "usage": usage.body})
    yield DONE


def _head(call: Call, model: Model, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.facts.id}", "object": kind, "created": began(call), "model": model.name}


def _logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": [{**_token(token), "top_logprobs": [_token(top) for top in token["top"]]} for token in tokens]}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    text, logprob = token["text"], token["logprob"]
    known = "\ufffd" not in text  # a part of a character has bytes that its text does not tell
    return {
        "token": text,
        "logprob": IMPOSSIBLE if logprob is None else logprob,
        "bytes": list(text.encode()) if known else None,
    }

"""POST /v1/chat/completions: messages through the model's own template, whole or as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from builder.gateway.call import Call
from builder.gateway.errors import bad_field
from builder.gateway.models import Model
from builder.gateway.openai import generation
from builder.gateway.openai.calling import Answer, demands_reading
from builder.gateway.openai.generation import began, generate, option_inputs, usage_member
from builder.gateway.openai.guide import Calling
from builder.gateway.openai.messages import MOST_MESSAGES, Message, Templated, as_template
from builder.gateway.openai.pieces import IMPOSSIBLE, Piece, Usage
from builder.gateway.responses import DONE, Stream, dumps, event


class Body(generation.Body, Calling, Templated):
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
    inputs = {**option_inputs(model, body), "messages": as_template(model, body.messages)}
    body.refuse_prompts()
    inputs |= _logprobs_input(body)
    if body.stream:
        inputs["stream"] = True
        return Stream((_call_events if demands_reading(body) else _events)(call, model, inputs, body))
    return await _whole(call, model, inputs, body)


def _logprobs_input(body: Body) -> dict[str, Any]:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true")
    return {"logprobs": body.top_logprobs or 0} if body.logprobs else {}


async def _whole(call: Call, model: Model, inputs: Mapping[str, Any], body: Body) -> dict[str, Any]:
    choices: dict[int, Choice] = {}
    usage = Usage()
    async with aclosing(generate(call, model, inputs)) as pieces:
        async for piece in pieces:
            choices.setdefault(piece.index, Choice()).add(piece)
            usage.add(piece)
    call.facts.prompt_tokens = usage.prompt
    return {
        **_head(call, model, "chat.completion"),
        "choices": [_choice(call, model, index, choice, body) for index, choice in sorted(choices.items())],
        "usage": usage.body,
    }


def _choice(call: Call, model: Model, index: int, choice: Choice, body: Body) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    reason = choice.finish_reason
    if demands_reading(body):
        answer = Answer(model, body, call.facts.id, index)
        content, calls = answer.whole(choice.text)
        message |= {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        reason = answer.reason(reason)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(choice.logprobs) if body.logprobs else None,
        "finish_reason": reason,
    }


async def _call_events(call: Call, model: Model, inputs: Mapping[str, Any], body: Body) -> AsyncGenerator[bytes, None]:
    """Chunks of text, and of each call when it is whole: a part of one is of no use to who makes it."""
    usage = Usage()
    answers: dict[int, Answer] = {}
    head = _head(call, model, "chat.completion.chunk") | ({"usage": None} if body.usage_wanted else {})
    async with aclosing(generate(call, model, inputs)) as pieces:
        async for piece in pieces:
            usage.add(piece)
            if body.usage_of_each:
                head["usage"] = usage.body
            if piece.index not in answers:
                answers[piece.index] = Answer(model, body, call.facts.id, piece.index)
            for chunk in answers[piece.index].chunks(piece):
                logprobs = chunk["logprobs"]
                yield event(
                    {**head, "choices": [{**chunk, "logprobs": None if logprobs is None else _logprobs(logprobs)}]}
                )
    call.facts.prompt_tokens = usage.prompt
    if body.usage_wanted:
        yield event({**head, "choices": [], "usage": usage.body})
    yield DONE


async def _events(call: Call, model: Model, inputs: Mapping[str, Any], body: Body) -> AsyncGenerator[bytes, None]:
    """Chunks. What all of them share is written once: a stream has one for each token."""
    usage, begun = Usage(), set()
    head = f"data: {dumps(_head(call, model, 'chat.completion.chunk'))[:-1]}," + '"choices":[{"index":'
    async with aclosing(generate(call, model, inputs)) as pieces:
        async for piece in pieces:
            role = "" if piece.index in begun else '"role":"assistant",'
            begun.add(piece.index)
            logprobs = "null" if piece.logprobs is None else dumps(_logprobs(piece.logprobs))
            reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
            usage.add(piece)
            yield (
                f'{head}{piece.index},"delta":{{{role}"content":{dumps(piece.text)}}},"logprobs":{logprobs},'
                f'"finish_reason":{reason}}}]{usage_member(body, usage)}}}\n\n'
            ).encode()
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

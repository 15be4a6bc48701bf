"""Serve POST /v1/completions: continuations of texts, whole or streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation import fields
from builder.serving.gateway.generation.fields import option_inputs, usage_member
from builder.serving.gateway.generation.generate import (
    MAX_PROMPTS,
    Completion,
    Piece,
    TokenUsage,
    generate_all,
    refuse_other_tasks,
    token_logprob,
)
from builder.serving.gateway.http_responses import DONE, dumps, event
from builder.serving.gateway.served_model import ServedModel


class CompletionRequest(fields.GenerationRequest):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


@dataclass(frozen=True)
class PreparedCompletion:
    """A completion that was read and validated: the model's inputs for each prompt. `usage` accumulates."""

    context: RequestContext
    model: ServedModel
    body: CompletionRequest
    prompts: Sequence[Mapping[str, Any]]
    usage: TokenUsage = field(default_factory=TokenUsage)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the pieces of all prompts, each with the index of its choice."""
        async with aclosing(generate_all(self.context, self.model, self.prompts)) as pieces:
            async for number, piece in pieces:
                self.usage.add(piece, number)
                yield number * (self.body.n or 1) + piece.index, piece
        self.context.record.prompt_tokens = self.usage.prompt

    def head(self) -> dict[str, Any]:
        """Return the first fields of a response or chunk."""
        identity, created = f"cmpl-{self.context.record.id}", self.context.record.created_at
        return {"id": identity, "object": "text_completion", "created": created, "model": self.model.label}


async def create_completion(context: RequestContext) -> Any:
    """Complete each prompt, whole or as a stream of chunks."""
    body: CompletionRequest = context.body
    model = await context.model(body.model)
    refuse_other_tasks(model)
    prompts = [_prompt_input(model, prompt) for prompt in _prompts(body.prompt)]
    inputs = option_inputs(model, body)
    if body.echo:
        if "echo" not in model.inputs:
            raise bad_field("echo", f"{model.name} answers a text, it does not continue it; leave echo out")
        inputs |= {"echo": True, **_prompt_logprobs(model, body)}
    if body.logprobs is not None:
        inputs["logprobs"] = body.logprobs
    if body.stream:
        inputs["stream"] = True
    completion = PreparedCompletion(context, model, body, [{**inputs, **prompt} for prompt in prompts])
    return _events(completion) if body.stream else await _whole(completion)


def _prompt_input(model: ServedModel, prompt: str | list[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text_input": prompt}
    if "input_ids" not in model.inputs:
        raise bad_field("prompt", f"prompt holds token ids; {model.name} takes texts")
    return {"input_ids": prompt}


def _prompt_logprobs(model: ServedModel, body: CompletionRequest) -> dict[str, Any]:
    """Return the input for an echoed prompt's log-probabilities. Raises ApiError if the model has none."""
    if body.logprobs is None:
        return {}
    if "prompt_logprobs" not in model.inputs:
        raise bad_field("echo", f"{model.name} was built without log-probabilities of prompts, which echo needs here")
    if (body.n or 1) > 1 and body.stream:
        raise bad_field("n", "echo with logprobs is streamed for one answer alone; leave n or stream out")
    return {"prompt_logprobs": body.logprobs}


def _prompts(value: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a request: texts, or lists of the model's own token ids."""
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise bad_field("prompt", f"prompt holds {len(prompts)} texts; send 1 to {MAX_PROMPTS}")
    for prompt in prompts:
        if not (isinstance(prompt, str) or _are_ids(prompt)):
            raise bad_field("prompt", "prompt is neither text nor a list of token ids, nor a list of these")
        if not prompt:
            raise bad_field("prompt", "prompt is empty; send at least one character")
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


async def _whole(completion: PreparedCompletion) -> dict[str, Any]:
    answers: dict[int, Completion] = {}
    async with aclosing(completion.pieces()) as pieces:
        async for index, piece in pieces:
            answers.setdefault(index, Completion()).add(piece)
    choices = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": None if completion.body.logprobs is None else _logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }
        for index, answer in sorted(answers.items())
    ]
    return {**completion.head(), "choices": choices, "usage": completion.usage.body}


async def _events(completion: PreparedCompletion) -> AsyncGenerator[bytes, None]:
    """Yield the chunks. Their common part is serialised once: a stream has a chunk per token."""
    body, usage, lengths = completion.body, completion.usage, Counter[int]()  # characters of each choice's tokens
    head = f"data: {dumps(completion.head())[:-1]}," + '"choices":[{"index":'
    async with aclosing(completion.pieces()) as pieces:
        async for index, piece in pieces:
            logprobs = "null" if piece.logprobs is None else dumps(_logprobs(piece.logprobs, lengths[index]))
            lengths[index] += sum(len(token["text"]) for token in piece.logprobs or ())
            reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
            yield (
                f'{head}{index},"text":{dumps(piece.text)},"logprobs":{logprobs},"finish_reason":{reason}}}]'
                f"{usage_member(body, usage)}}}\n\n"
            ).encode()
    if body.includes_usage:
        yield event({**completion.head(), "choices": [], "usage": usage.body})
    yield DONE


def _logprobs(tokens: list[dict[str, Any]], at: int = 0) -> dict[str, Any]:
    """Return OpenAI's logprobs object. `at`: number of characters of the choice's tokens before these."""
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        top_logprobs: dict[str, float] = {}
        for top in (*token["top"], token):  # best first: of equal texts the likeliest counts; includes the token itself
            top_logprobs.setdefault(top["text"], token_logprob(top))
        has_none = token["logprob"] is None and not token["top"]  # a prompt's first token
        logprobs["tokens"].append(token["text"])
        logprobs["token_logprobs"].append(None if has_none else token_logprob(token))
        logprobs["top_logprobs"].append(None if has_none else top_logprobs)
        logprobs["text_offset"].append(at)
        at += len(token["text"])
    return logprobs

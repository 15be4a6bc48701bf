"""What chats and completions share: fields to inputs of the model, and requests of it.

OpenAI's names become the model's (MEANING). A field that is an input of the model under its own name goes in as it is,
so that top_k, min_p, ignore_eos and the like work as they do with vLLM. Whatever is neither is refused by its name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from tritonclient.grpc import service_pb2

from builder.gateway.call import Call
from builder.gateway.errors import ApiError, bad_field
from builder.gateway.models import Model
from builder.gateway.openai.guide import GUIDING, guide_inputs
from builder.gateway.openai.pieces import Piece, Usage, read_pieces
from builder.gateway.responses import dumps
from builder.gateway.tensors import add_tensor, refuse_count

MEANING: Mapping[str, str] = {  # OpenAI's field -> the model's input
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "stop": "stop_words",
    "seed": "random_seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
DOCUMENTS = ("logit_bias", "chat_template_kwargs")  # inputs of JSON
ABOUT_THE_CLIENT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS: Mapping[str, Any] = {"best_of": 1, "modalities": ["text"], "suffix": "", "echo": False, "top_logprobs": 0}
ROUTED = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "add_generation_prompt",
}  # by a route
COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
PERF = "return_perf_metrics"  # what usage and metrics have besides counts of tokens
STANDING: Mapping[str, Any] = {"n": 1, PERF: True}  # inputs of every request, where it does not say otherwise
OF_THE_ROUTE = {  # inputs that no field sets under its own name
    "text_input",
    "input_ids",
    "sampling_parameters",
    "messages",
    "stream",
    "logprobs",
    "prompt_logprobs",
    "return_logprobs",
    "echo",
    "guide",
    "tools",
    "timeout_ms",
    *COUNTS,
    PERF,
}
MOST_PROMPTS = 128  # of one request


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with every chunk


class Body(BaseModel):
    """Fields that a chat and a completion have in common; the others are looked at one by one, in `option_inputs`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=16)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_of_each(self) -> bool:
        return self.usage_wanted and self.stream_options is not None and self.stream_options.continuous_usage_stats


def usage_member(body: Body, usage: Usage) -> str:
    """What a chunk says of usage, as JSON after its other members."""
    if not body.usage_wanted:
        return ""
    return f',"usage":{dumps(usage.body)}' if body.usage_of_each else ',"usage":null'


def option_inputs(model: Model, body: Body) -> dict[str, Any]:
    """The inputs that a request's options become. Raises ApiError for a field that the model cannot heed."""
    inputs: dict[str, Any] = {**guide_inputs(model, body), **_counting(model, body)}
    stated = {name: value for name, value in body if value is not None and value != []}
    looked_at = {*ABOUT_THE_CLIENT, *GUIDING, *ROUTED.intersection(type(body).model_fields)}  # elsewhere
    for name, value in stated.items():
        if name in looked_at or (name in HARMLESS and value == HARMLESS[name]):
            continue
        target = MEANING.get(name, name)
        if target not in model.inputs or target in OF_THE_ROUTE:
            raise bad_field(name, f"{name} is not something that {model.name} can heed; leave it out")
        inputs[target] = dumps(value) if name in DOCUMENTS else value
    return inputs


def _counting(model: Model, body: Body) -> dict[str, bool]:
    """The inputs that have every response count its tokens."""
    if not body.usage_of_each:
        return {}
    if not set(COUNTS) <= set(model.inputs):
        raise bad_field(
            "stream_options", f"{model.name} counts its tokens at the end; leave continuous_usage_stats out"
        )
    return dict.fromkeys(COUNTS, True)


def began(call: Call) -> int:
    """When a request came, in seconds since 1970."""
    return int(time.time() - call.facts.elapsed_s)


async def generate(call: Call, model: Model, inputs: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
    """The pieces of one prompt. Raises ApiError; notes the time of the first one and the tokens used."""
    facts, metrics = call.facts, call.gateway.metrics
    between = metrics.between.labels(model.name)
    streaming, last = inputs.get("stream", False), 0.0
    stream, unanswered = call.gateway.triton.stream(make_request(call, model, inputs), call.metadata), ExitStack()
    async with aclosing(stream) as answers:
        unanswered.enter_context(metrics.unanswered.track_inprogress())
        try:
            async for outputs in answers:
                unanswered.close()
                now = time.perf_counter()
                if facts.first_token_s is None:
                    facts.first_token_s = now - facts.started
                    if streaming:
                        metrics.first_token.labels(model.name).observe(facts.first_token_s)
                elif streaming and last:
                    between.observe(now - last)
                last = now
                for piece in read_pieces(outputs):
                    facts.completion_tokens += piece.completion_tokens
                    if piece.finish_reason:
                        if piece.queue_s is not None and piece.index == 0:
                            metrics.queue.labels(model.name).observe(piece.queue_s)
                        metrics.success.labels(model.name, piece.finish_reason).inc()
                    yield piece
        except ApiError as error:
            if error.status == 400:  # the model's refusals begin with the name of the input
                error.param = error.param or _openai_name(model, error.message.split(" ", 1)[0].rstrip(":"))
            raise
        finally:
            unanswered.close()


async def together(
    call: Call, model: Model, requests: Sequence[Mapping[str, Any]]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of several prompts, answered at once, as they come; each with the number of its prompt."""
    if len(requests) == 1:
        async with aclosing(generate(call, model, requests[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(64)

    async def read(number: int, inputs: Mapping[str, Any]) -> None:
        try:
            async with aclosing(generate(call, model, inputs)) as pieces:
                async for piece in pieces:
                    await arrived.put((number, piece))
            await arrived.put((number, None))
        except Exception as error:
            await arrived.put((number, error))

    tasks = [asyncio.ensure_future(read(number, inputs)) for number, inputs in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            number, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refuse_other_models(model: Model) -> None:
    """Raise ApiError for a model that generates no text."""
    if not model.streams or "text_output" not in model.outputs:
        raise bad_field("model", f"{model.name} is a model for {model.task}; it does not generate text")


def make_request(call: Call, model: Model, inputs: Mapping[str, Any]) -> Any:
    """The request of one prompt, for one answer where `inputs` do not say: a checkpoint may have a number of its own.

    Raises ApiError for a value that an input does not take.
    """
    request = service_pb2.ModelInferRequest(model_name=model.name, id=call.facts.id)
    standing = {name: value for name, value in STANDING.items() if name in model.inputs}
    inputs = {**standing, **inputs}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        try:
            refuse_count(model.inputs[name], values)
            add_tensor(request, model.inputs[name], values, (1, len(values)) if model.batch else (len(values),))
        except ApiError as error:
            raise bad_field(_openai_name(model, name) or name, error.message) from error
    return request


def _openai_name(model: Model, name: str) -> str | None:
    """What OpenAI calls an input of the model; None for a word that is no input."""
    names = {"stop_words": "stop", "random_seed": "seed", "text_input": "prompt"}
    return names.get(name, name) if name in model.inputs else None

"""Send requests to a generating model, and read the pieces of its answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2

from builder.runtime.adapter_files import ADAPTER
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.tensors import Outputs, add_tensor, refuse_count

PERF = "return_perf_metrics"  # input that requests timings, for usage and metrics
DEFAULT_INPUTS: Mapping[str, Any] = {"n": 1, PERF: True}  # inputs of every request that does not set them
MAX_PROMPTS = 128  # prompts of one request


@dataclass(frozen=True)
class Piece:
    """One piece of a sequence: text, log-probabilities of its tokens and, in the last piece, the finish reason.

    The last piece carries the token counts; on request, every piece does. `thinking`: set in a first piece if the
    prompt ends with the mark that begins the model's reasoning.
    """

    index: int
    text: str
    logprobs: list[dict[str, Any]] | None
    finish_reason: str | None = None
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    thinking: bool = False


@dataclass
class Completion:
    """Complete text of one sequence."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs or []
        self.finish_reason = piece.finish_reason or self.finish_reason


@dataclass
class TokenUsage:
    """Tokens of an answer so far."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    counted: set[int] = field(default_factory=set)  # numbers of the prompts that were counted
    ended: set[int] = field(default_factory=set)

    def add(self, piece: Piece, prompt: int = 0) -> None:
        """Add a piece's tokens and, once for each prompt, the prompt's tokens."""
        self.completion += piece.completion_tokens
        if piece.prompt_tokens and prompt not in self.counted:
            self.counted.add(prompt)
            self.prompt += piece.prompt_tokens
        if piece.finish_reason is not None and prompt not in self.ended:
            self.ended.add(prompt)
            self.cached += piece.cached_tokens

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def read_pieces(outputs: Outputs) -> list[Piece]:
    """Return the pieces of one response: one piece, or all sequences of an answer that came whole."""
    texts = outputs["text_output"].strings()
    if len(outputs) == 1:  # fast path: nearly every step of a stream
        return [Piece(0, texts[0], None)]
    indices = _whole(outputs, "index") if "index" in outputs else [0]
    logprobs = _logprobs(outputs, len(texts))
    ended = "finish_reason" in outputs
    reasons = outputs["finish_reason"].strings() if ended else [None] * len(texts)
    of_each = "num_output_tokens" in outputs
    counted = of_each or ended
    counts = _whole(outputs, "num_output_tokens" if of_each else "completion_tokens") if counted else [0] * len(texts)
    prompt = _whole(outputs, "num_input_tokens" if of_each else "prompt_tokens")[0] if counted else 0
    cached = _whole(outputs, "cached_tokens")[0] if "cached_tokens" in outputs else 0
    waited = float(outputs["queue_seconds"].array().item()) if "queue_seconds" in outputs else None
    thinking = "thinking" in outputs
    return [
        Piece(index, text, entry, reason, count, prompt, cached, waited, thinking)
        for index, text, entry, reason, count in zip(indices, texts, logprobs, reasons, counts, strict=True)
    ]


def token_logprob(token: Mapping[str, Any]) -> float:
    """Return the log-probability of a token; -9999 for an impossible one, as OpenAI does."""
    return -9999.0 if token["logprob"] is None else float(token["logprob"])


def _whole(outputs: Outputs, name: str) -> list[int]:
    """Return the integers of an output, whose shape may begin with a batch dimension of 1."""
    return outputs[name].array().ravel().tolist()


def _logprobs(outputs: Outputs, texts: int) -> list[list[dict[str, Any]] | None]:
    """Return the tokens of each text with their log-probabilities, an echoed prompt's first; None if not requested."""
    if "logprobs_output" not in outputs:
        return [None] * texts
    prompt = json.loads(outputs["prompt_logprobs_output"].strings()[0]) if "prompt_logprobs_output" in outputs else []
    return [prompt + json.loads(entry) for entry in outputs["logprobs_output"].strings()]


async def generate(
    context: RequestContext, model: ServedModel, inputs: Mapping[str, Any]
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of one prompt. Raises ApiError; records the time to the first piece and the tokens used."""
    record, metrics = context.record, context.gateway.metrics
    between = metrics.between.labels(model.name)
    streaming, last, unanswered = inputs.get("stream", False), 0.0, ExitStack()
    stream = context.gateway.triton.stream(make_request(context, model, inputs), context.metadata)
    async with aclosing(stream) as answers:
        unanswered.enter_context(metrics.unanswered.track_inprogress())
        try:
            async for outputs in answers:
                unanswered.close()
                now = time.perf_counter()
                if record.first_token_s is None:
                    record.first_token_s = now - record.started
                    if streaming:
                        metrics.first_token.labels(model.name).observe(record.first_token_s)
                elif streaming and last:
                    between.observe(now - last)
                last = now
                for piece in read_pieces(outputs):
                    record.completion_tokens += piece.completion_tokens
                    if piece.finish_reason:
                        if piece.queue_s is not None and piece.index == 0:
                            metrics.queue.labels(model.name).observe(piece.queue_s)
                        metrics.success.labels(model.name, piece.finish_reason).inc()
                    yield piece
        except ApiError as error:
            if error.status == 400:  # the model's error messages begin with the name of the input
                error.param = error.param or _openai_name(model, error.message.split(" ", 1)[0].rstrip(":"))
                if model.adapter and error.param == ADAPTER.name:
                    raise ApiError(404, error.message, param="model", code="model_not_found") from error
            raise
        finally:
            unanswered.close()


async def generate_all(
    context: RequestContext, model: ServedModel, requests: Sequence[Mapping[str, Any]]
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield the pieces of several prompts, answered concurrently, each with the number of its prompt."""
    if len(requests) == 1:
        async with aclosing(generate(context, model, requests[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(64)

    async def read(number: int, inputs: Mapping[str, Any]) -> None:
        try:
            async with aclosing(generate(context, model, inputs)) as pieces:
                async for piece in pieces:
                    await arrived.put((number, piece))
            await arrived.put((number, None))
        except Exception as error:
            await arrived.put((number, error))

    tasks = [asyncio.ensure_future(read(number, inputs)) for number, inputs in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            number, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refuse_other_tasks(model: ServedModel) -> None:
    """Raise ApiError for a model that does not generate text."""
    if not model.is_decoupled or "text_output" not in model.outputs:
        raise bad_field("model", f"{model.name} is a model for {model.task}; it does not generate text")


def make_request(context: RequestContext, model: ServedModel, inputs: Mapping[str, Any]) -> Any:
    """Build the request of one prompt. Raises ApiError for a value that an input does not accept.

    It asks for one answer unless `inputs` set `n`: a checkpoint may have another default.
    """
    request = service_pb2.ModelInferRequest(model_name=model.name, id=context.record.id)
    defaults = {name: value for name, value in DEFAULT_INPUTS.items() if name in model.inputs}
    for name, value in {**defaults, **model.with_adapter(inputs)}.items():
        values = value if isinstance(value, list) else [value]
        try:
            refuse_count(model.inputs[name], values)
            add_tensor(request, model.inputs[name], values, (1, len(values)) if model.batch else (len(values),))
        except ApiError as error:
            raise bad_field(_openai_name(model, name) or name, error.message) from error
    return request


def _openai_name(model: ServedModel, name: str) -> str | None:
    """Return OpenAI's name for an input of the model; None for a word that is not an input."""
    names = {"stop_words": "stop", "random_seed": "seed", "text_input": "prompt"}
    return names.get(name, name) if name in model.inputs else None

"""Send requests to a generating model, and yield the pieces of its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from tritonclient.grpc import service_pb2

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.generation.fields import PERF
from builder.serving.gateway.generation.pieces import Piece, read_pieces
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.tensors import add_tensor, refuse_count

DEFAULT_INPUTS: Mapping[str, Any] = {"n": 1, PERF: True}  # inputs of every request that does not set them
MAX_PROMPTS = 128  # prompts of one request


def created_at(context: RequestContext) -> int:
    """Return the time at which a request came, in seconds since 1970."""
    return int(time.time() - context.record.elapsed_s)


async def generate(
    context: RequestContext, model: ServedModel, inputs: Mapping[str, Any]
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of one prompt. Raises ApiError; records the time to the first piece and the tokens used."""
    record, metrics = context.record, context.gateway.metrics
    between = metrics.between.labels(model.name)
    streaming, last = inputs.get("stream", False), 0.0
    stream, unanswered = (
        context.gateway.triton.stream(make_request(context, model, inputs), context.metadata),
        ExitStack(),
    )
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
    inputs = {**defaults, **inputs}
    for name, value in inputs.items():
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

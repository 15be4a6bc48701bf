"""Serve POST /v1/tasks/TASK and /models/NAME: any task with its own inputs, in the shape of Hugging Face's pipelines.

{"model": "names", "inputs": "text" | {input: value} | [either, ...], "parameters": {option: value}}
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.endpoint import validate_body
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.generate import MAX_PROMPTS, generate_all
from builder.serving.gateway.generation.pieces import Completion, TokenUsage
from builder.serving.gateway.pipelines import (
    VectorOptions,
    can_run,
    generated_answer,
    model_options,
    pipeline_answer,
    whole_answer,
)
from builder.serving.gateway.rows import infer_rows
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody
from builder.serving.gateway.vectors import Sentences, similarities

UNSUPPORTED_INPUTS = ("stream", "n", "logprobs")  # a single answer of text has no place for these


class TaskRequest(ExtensibleBody):
    """Parameters may also be next to `inputs`, where feature-extraction's clients send them."""

    model: str | None = None
    inputs: str | dict[str, Any] | Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=4096)]
    parameters: dict[str, Any] = Field({})


async def run(context: RequestContext) -> Any:
    """Serve POST /v1/tasks/TASK: the answers of a model for the task in the path."""
    body: TaskRequest = context.body
    task = context.path["task"]
    model = await context.model_for(f"for {task}", lambda model: can_run(model, task), body.model)
    return await _answer(context, model, body)


async def run_model(context: RequestContext) -> Any:
    """Serve POST /models/NAME: the answers of the model in the path, whatever its task."""
    body: TaskRequest = context.body
    if body.model not in (None, context.path["name"]):
        raise bad_field("model", f"model is {body.model!r} and the path says {context.path['name']!r}; leave model out")
    return await _answer(context, await context.model(context.path["name"]), body)


async def _answer(context: RequestContext, model: ServedModel, body: TaskRequest) -> Any:
    options = model_options(model, {**(body.model_extra or {}), **body.parameters})
    if model.is_embedder and isinstance(body.inputs, dict) and "sentences" in body.inputs:
        _refuse_unknown(model, options)
        return await similarities(context, model, validate_body(Sentences, body.inputs), **options)
    vectors = {
        name: options.pop(name) for name in VectorOptions.model_fields if name in options and _has_vectors(model)
    }
    _refuse_unknown(model, options)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    rows = [_row(model, number, entry, options) for number, entry in enumerate(inputs)]
    if model.is_decoupled:
        answers = await _generated(context, model, rows, options)
    elif _has_vectors(model):
        post = validate_body(VectorOptions, vectors)
        answers = post.apply(model, [row["embedding"] for row in await _rows(context, model, rows, options)])
    else:
        answers = [pipeline_answer(model, row, options) for row in await _rows(context, model, rows, options)]
    return whole_answer(model, answers, single=not isinstance(body.inputs, list))


async def _rows(
    context: RequestContext, model: ServedModel, rows: list[dict[str, Any]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    lists = [{name: v if isinstance(v, list) else [v] for name, v in row.items()} for row in rows]
    if _has_vectors(model) and not model.is_embedder:  # texts of unequal length have no common shape
        return [row for one in lists for row in await infer_rows(context, model, [one], options)]
    return await infer_rows(context, model, lists, options)


async def _generated(
    context: RequestContext, model: ServedModel, rows: list[dict[str, Any]], options: dict[str, Any]
) -> list[Any]:
    if len(rows) > MAX_PROMPTS:
        raise bad_field("inputs", f"inputs holds {len(rows)} texts; send at most {MAX_PROMPTS}")
    choices, usage = [Completion() for _ in rows], TokenUsage()
    async with aclosing(generate_all(context, model, [{**options, **row} for row in rows])) as pieces:
        async for number, piece in pieces:
            choices[number].add(piece)
            usage.add(piece, number)
    context.record.prompt_tokens = usage.prompt
    return [generated_answer(model, choice.text, choice.finish_reason) for choice in choices]


def _has_vectors(model: ServedModel) -> bool:
    return "embedding" in model.outputs


def _row(model: ServedModel, number: int, value: str | dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    required = [f.name for f in model.inputs.values() if not (f.optional or f.name in given)] or ["text_input"]
    if isinstance(value, str):
        if len(required) > 1:
            names = ", ".join(required)
            raise bad_field("inputs", f"inputs[{number}] is text; {model.name} needs {names}: send an object")
        return {required[0]: value}
    missing = [name for name in required if name not in value]
    if missing:
        raise bad_field("inputs", f"inputs[{number}] has no {missing[0]}, which {model.name} needs")
    _refuse_unknown(model, value)
    return value


def _refuse_unknown(model: ServedModel, names: Collection[str]) -> None:
    for name in names:
        if name not in model.inputs or (model.is_decoupled and name in UNSUPPORTED_INPUTS):
            raise bad_field(name, f"{model.name} does not support {name}; its inputs are {', '.join(model.inputs)}")

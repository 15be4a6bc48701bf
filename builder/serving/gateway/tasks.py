"""POST /v1/tasks/TASK and /models/NAME: every task with its own inputs, in the shape of Hugging Face's pipelines.

{"model": "names", "inputs": "text" | {input: value} | [either, ...], "parameters": {option: value}}
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from builder.serving.gateway.call import Call
from builder.serving.gateway.endpoint import checked
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.asking import MOST_PROMPTS, together
from builder.serving.gateway.generation.pieces import Completion, Usage
from builder.serving.gateway.models import Model
from builder.serving.gateway.pipelines import VectorOptions, answer_of, generated, model_options, serves, whole_answer
from builder.serving.gateway.rows import ask_rows
from builder.serving.gateway.similarity import Sentences, similarities

OF_THE_SERVER = ("stream", "n", "logprobs")  # a single answer of text has no place for these


class Body(BaseModel):
    """Parameters may also be next to `inputs`, where feature-extraction's clients send them."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    inputs: str | dict[str, Any] | Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=4096)]
    parameters: dict[str, Any] = {}


async def run(call: Call) -> Any:
    """Serve POST /v1/tasks/TASK: the answers of a model for the task in the path."""
    body: Body = call.body
    task = call.path["task"]
    model = await call.model_for(f"for {task}", lambda model: serves(model, task), body.model)
    return await _answer(call, model, body)


async def run_model(call: Call) -> Any:
    """Serve POST /models/NAME: the answers of the model in the path, whatever its task."""
    body: Body = call.body
    if body.model not in (None, call.path["name"]):
        raise bad_field("model", f"model is {body.model!r} and the path says {call.path['name']!r}; leave model out")
    return await _answer(call, await call.model(call.path["name"]), body)


async def _answer(call: Call, model: Model, body: Body) -> Any:
    options = model_options(model, {**(body.model_extra or {}), **body.parameters})
    if model.embeds and isinstance(body.inputs, dict) and "sentences" in body.inputs:
        _refuse_unknown(model, options)
        sentences: Any = checked(Sentences, body.inputs)
        return await similarities(call, model, sentences, **options)
    vectors = {
        name: options.pop(name) for name in VectorOptions.model_fields if name in options and _has_vectors(model)
    }
    _refuse_unknown(model, options)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    rows = [_row(model, number, entry, options) for number, entry in enumerate(inputs)]
    if model.streams:
        answers = await _generated(call, model, rows, options)
    elif _has_vectors(model):
        post: Any = checked(VectorOptions, vectors)
        answers = post.apply(model, [row["embedding"] for row in await _rows(call, model, rows, options)])
    else:
        answers = [answer_of(model, row, options) for row in await _rows(call, model, rows, options)]
    return whole_answer(model, answers, single=not isinstance(body.inputs, list))


async def _rows(call: Call, model: Model, rows: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    lists = [{name: v if isinstance(v, list) else [v] for name, v in row.items()} for row in rows]
    if _has_vectors(model) and not model.embeds:  # texts of unequal length have no common shape
        return [row for one in lists for row in await ask_rows(call, model, [one], options)]
    return await ask_rows(call, model, lists, options)


async def _generated(call: Call, model: Model, rows: list[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
    if len(rows) > MOST_PROMPTS:
        raise bad_field("inputs", f"inputs holds {len(rows)} texts; send at most {MOST_PROMPTS}")
    choices, usage = [Completion() for _ in rows], Usage()
    async with aclosing(together(call, model, [{**options, **row} for row in rows])) as pieces:
        async for number, piece in pieces:
            choices[number].add(piece)
            usage.add(piece, number)
    call.facts.prompt_tokens = usage.prompt
    return [generated(model, choice.text, choice.finish_reason) for choice in choices]


def _has_vectors(model: Model) -> bool:
    return "embedding" in model.outputs


def _row(model: Model, number: int, value: str | dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    required = [f.name for f in model.inputs.values() if not (f.optional or f.name in given)] or ["text_input"]
    if isinstance(value, str):
        if len(required) > 1:
            wanted = ", ".join(required)
            raise bad_field("inputs", f"inputs[{number}] is text; {model.name} needs {wanted}: send an object")
        return {required[0]: value}
    missing = [name for name in required if name not in value]
    if missing:
        raise bad_field("inputs", f"inputs[{number}] has no {missing[0]}, which {model.name} needs")
    _refuse_unknown(model, value)
    return value


def _refuse_unknown(model: Model, names: Collection[str]) -> None:
    for name in names:
        if name not in model.inputs or (model.streams and name in OF_THE_SERVER):
            raise bad_field(name, f"{name} is not something that {model.name} takes; it has {', '.join(model.inputs)}")

"""POST /v1/tasks/TASK: every task by its own inputs, for what no other API has a route for.

{"model": "names", "inputs": "text" | {input: value} | [either, ...], "parameters": {option: value}}
answers {"model": ..., "results": [...]}, one result for each of a list of inputs, a single one for a single input.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from builder.gateway.call import Call
from builder.gateway.errors import bad_field
from builder.gateway.generation.asking import MOST_PROMPTS, together
from builder.gateway.generation.pieces import Completion, Usage
from builder.gateway.models import Model
from builder.gateway.rows import TOKENS, as_values, ask_rows

IN_JSON = ("entities", "predictions", "answers")  # outputs of one string that is a JSON document
OF_THE_SERVER = ("stream", "n", "logprobs")  # what a single answer of text has no place for


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    inputs: str | dict[str, Any] | Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=4096)]
    parameters: dict[str, Any] = {}


async def run(call: Call) -> dict[str, Any]:
    """The answers of the task that the path names."""
    body: Body = call.body
    task = call.path["task"]
    model = await call.model_for(f"for {task}", lambda model: model.task == task, body.model)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    rows = [_row(model, number, entry) for number, entry in enumerate(inputs)]
    options = {name: value for name, value in body.parameters.items() if value is not None}
    _refuse_unknown(model, options)
    results = await (_generated if model.streams else _answered)(call, model, rows, options)
    used = {"prompt_tokens": call.facts.prompt_tokens, "completion_tokens": call.facts.completion_tokens}
    used["total_tokens"] = sum(used.values())
    return {"model": model.name, "results": results if isinstance(body.inputs, list) else results[0], "usage": used}


async def _answered(call: Call, model: Model, rows: list[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
    lists = [{name: v if isinstance(v, list) else [v] for name, v in row.items()} for row in rows]
    if model.batch and any(-1 in field.dims for field in model.outputs.values()) and "embedding" in model.outputs:
        answers = [row for one in lists for row in await ask_rows(call, model, [one], options)]  # no common shape
    else:
        answers = await ask_rows(call, model, lists, options)
    return [_result(model, answer) for answer in answers]


async def _generated(call: Call, model: Model, rows: list[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
    if len(rows) > MOST_PROMPTS:
        raise bad_field("inputs", f"inputs holds {len(rows)} texts; send at most {MOST_PROMPTS}")
    choices, usage = [Completion() for _ in rows], Usage()
    async with aclosing(together(call, model, [{**options, **row} for row in rows])) as pieces:
        async for number, piece in pieces:
            choices[number].add(piece)
            usage.add(piece, number)
    call.facts.prompt_tokens = usage.prompt
    return [{"text_output": choice.text, "finish_reason": choice.finish_reason} for choice in choices]


def _result(model: Model, row: dict[str, Any]) -> dict[str, Any]:
    values = as_values({name: array for name, array in row.items() if name != TOKENS}, model.outputs)
    return {name: json.loads(value) if name in IN_JSON else value for name, value in values.items()}


def _row(model: Model, number: int, value: str | dict[str, Any]) -> dict[str, Any]:
    required = [field.name for field in model.inputs.values() if not field.optional] or ["text_input"]
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


def _refuse_unknown(model: Model, value: dict[str, Any]) -> None:
    for name in value:
        if name not in model.inputs or (model.streams and name in OF_THE_SERVER):
            raise bad_field(name, f"{name} is not something that {model.name} takes; it has {', '.join(model.inputs)}")

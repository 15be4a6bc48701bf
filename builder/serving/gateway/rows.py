"""Send many rows to a model that answers once, in as few concurrent requests as its batch size allows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from builder.runtime.fields import Field
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.model_config import MODEL_INPUT
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.tensors import Outputs, add_tensor, refuse_count

Row = Mapping[str, Sequence[Any]]  # input -> its values
TOKENS = "prompt_tokens"  # output with the token count of a row, if the model has it


async def infer_rows(
    context: RequestContext, model: ServedModel, rows: Sequence[Row], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return each row's outputs as numpy arrays without the batch dimension, with strings as str.

    `options`: inputs with one value for all rows. Counts the tokens of the rows, if the model does.
    Raises ApiError; if one request of several is refused, the message names its first row.
    """
    requests = [(first, _request(context, model, part, options)) for first, part in _parts(rows, max(1, model.batch))]
    calls = [_ask(context, request, first, len(requests)) for first, request in requests]
    answers = await _all(calls)
    answered = [row for answer in answers for row in _rows(answer)]
    context.record.prompt_tokens += sum(int(row[TOKENS][0]) for row in answered if TOKENS in row)
    return answered


async def _all(calls: Sequence[Any]) -> list[Outputs]:
    """Return all answers; the first failure cancels the other calls."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(one) for one in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _ask(context: RequestContext, request: Any, first: int, requests: int) -> Outputs:
    try:
        return await context.gateway.triton.infer(request, context.metadata)
    except ApiError as error:
        if requests > 1 and error.status == 400:
            error.message = f"of the rows from {first}: {error.message}"
        raise


def _parts(rows: Sequence[Row], size: int) -> list[tuple[int, Sequence[Row]]]:
    """Return groups of at most `size` adjacent rows of one shape, each with the number of its first row."""
    parts: list[tuple[int, list[Row]]] = []
    for number, row in enumerate(rows):
        if parts and len(parts[-1][1]) < size and _shape(parts[-1][1][0]) == _shape(row):
            parts[-1][1].append(row)
        else:
            parts.append((number, [row]))
    return list(parts)


def _shape(row: Row) -> list[tuple[str, int]]:
    return sorted((name, len(values)) for name, values in row.items())


def _request(context: RequestContext, model: ServedModel, rows: Sequence[Row], options: Mapping[str, Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model.front or model.name, id=context.record.id)
    if model.front is not None:
        add_tensor(request, MODEL_INPUT, [model.name] * len(rows), (len(rows), 1))
    for name in rows[0]:
        refuse_count(model.inputs[name], rows[0][name])
        values = [value for row in rows for value in row[name]]
        add_tensor(request, model.inputs[name], values, (len(rows), len(rows[0][name])))
    for name, option in options.items():
        values = list(option) if isinstance(option, (list, tuple)) else [option]
        refuse_count(model.inputs[name], values)
        add_tensor(request, model.inputs[name], values * len(rows), (len(rows), len(values)))
    return request


def _rows(outputs: Outputs) -> list[dict[str, Any]]:
    arrays = {name: output.array() for name, output in outputs.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ApiError(500, f"the model answered {name} with a number that is not finite; JSON has none for it")
    count = len(next(iter(arrays.values())))
    return [{name: array[row] for name, array in arrays.items()} for row in range(count)]


def as_values(row: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return a row of outputs as JSON values; a tensor declared with exactly one value becomes that value."""
    return {
        name: array.tolist()[0] if tuple(fields[name].dims) == (1,) else array.tolist() for name, array in row.items()
    }

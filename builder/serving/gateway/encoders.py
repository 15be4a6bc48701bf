"""Send texts to models that answer once, and embed, classify and rank them for the routes of every API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic
from tritonclient.grpc import service_pb2

from builder.runtime.adapter_files import ADAPTER
from builder.runtime.encoder.scores import CLASS_SCORES
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.served_model import MODEL_INPUT, ServedModel
from builder.serving.gateway.tensors import Outputs, add_tensor, refuse_count
from builder.serving.gateway.validation import StrictBody

MAX_TEXTS = 4096  # of one request of Hugging Face's clients
MAX_DOCUMENTS = 10_000  # of one request
MAX_DOCUMENTS_AT_ONCE = 64  # documents per request to the model, so that other requests get a turn
ALL_LABELS = 2**31 - 1
FUNCTION = "function_to_apply"  # input that selects the function applied to the logits
TOKENS = "prompt_tokens"  # output with the token count of a row, if the model has it
Row = Mapping[str, Sequence[Any]]  # input -> its values
Texts = Annotated[list[str], pydantic.Field(min_length=1, max_length=MAX_TEXTS)]


class Sentences(StrictBody):
    """Sentences to compare, of TEI's POST /similarity and Hugging Face's sentence-similarity."""

    source_sentence: str
    sentences: Texts


def as_list(texts: str | list[str]) -> list[str]:
    """Return one or several texts as a list."""
    return [texts] if isinstance(texts, str) else texts


def is_classifier(model: ServedModel) -> bool:
    """Return True for a classifier of texts or pairs."""
    return model.task == "text-classification"


def is_reranker(model: ServedModel) -> bool:
    """Return True if a model scores documents for a query."""
    return {"query", "documents"} <= set(model.inputs) and "score" in model.outputs


def is_token_embedder(model: ServedModel) -> bool:
    """Return True for a model that answers one vector per token: its features, or those of late interaction."""
    output = model.outputs.get("vectors", model.outputs.get("embedding"))
    return output is not None and len(output.dims) == 2


def is_sparse_embedder(model: ServedModel) -> bool:
    """Return True for a model that answers tokens of its vocabulary with weights."""
    return {"indices", "values"} <= set(model.outputs)


def token_vectors(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the vectors of a text's tokens (tokens, size); rows of a batch are padded to the longest."""
    return row["vectors"][: int(row["vector_count"][0])] if "vectors" in row else row["embedding"]


def sparse_weights(row: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the tokens of a row with their weights, without padding."""
    pairs = zip(row["indices"], row["values"], strict=True)
    return [{"index": int(index), "value": float(value)} for index, value in pairs if index >= 0]


async def embed(context: RequestContext, model: ServedModel, texts: Sequence[str], **options: Any) -> list[np.ndarray]:
    """Return one float32 vector per text. `options` that are None keep the default of the model. Raises ApiError."""
    if not model.is_embedder:
        message = f"{model.name} is a model for {model.task}; it does not answer one vector a text: see /v1/models"
        raise bad_field("model", message)
    explicit = {name: value for name, value in options.items() if value is not None}
    model.refuse_unknown_inputs(explicit)
    rows = await infer_rows(context, model, [{"text_input": [text]} for text in texts], explicit)
    return [row["embedding"] for row in rows]


async def embed_tokens(
    context: RequestContext, model: ServedModel, texts: Sequence[str], options: Mapping[str, Any]
) -> list[np.ndarray]:
    """Return the vectors of each text's tokens (tokens, size)."""
    rows = []
    for text in texts:  # texts of unequal length have no common shape
        rows += await infer_rows(context, model, [{"text_input": [text]}], options)
    return [token_vectors(row) for row in rows]


async def similarities(context: RequestContext, model: ServedModel, inputs: Sentences, **options: Any) -> list[float]:
    """Return the cosine of each sentence's vector with that of the source sentence."""
    source, *others = await embed(context, model, [inputs.source_sentence, *inputs.sentences], **options)
    return [float(normalize(source) @ normalize(other)) for other in others]


async def label_rows(
    context: RequestContext, model: ServedModel, inputs: Sequence[str | list[str]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a classifier's outputs for each text or pair, with all labels. Raises ApiError."""
    rows = []
    for number, value in enumerate(inputs):
        texts = as_list(value)
        if not 1 <= len(texts) <= 2:
            raise bad_field("inputs", f"inputs[{number}] has {len(texts)} texts; send one, or a pair")
        rows.append(dict(zip(("text_input", "text_pair"), ([text] for text in texts), strict=False)))
    return await infer_rows(context, model, rows, {"top_k": ALL_LABELS, **options})


def label_scores(row: Mapping[str, np.ndarray]) -> list[tuple[str, float]]:
    """Return the labels of a classifier's row with their scores, best first."""
    return [(str(label), float(score)) for label, score in zip(row["label"], row["score"], strict=True)]


def class_scores(model: ServedModel, row: Mapping[str, np.ndarray]) -> list[float]:
    """Return the scores of a classifier's row in the order of the labels, which an adapter may have of its own."""
    if CLASS_SCORES in row:
        return [float(score) for score in row[CLASS_SCORES]]
    scores = dict(label_scores(row))
    return [scores[label] for label in model.labels or sorted(scores)]


async def relevance_scores(
    context: RequestContext, model: ServedModel, query: str, texts: Sequence[str], options: Mapping[str, Any]
) -> list[float]:
    """Return the score of each text, in their order."""
    parts = [texts[at : at + MAX_DOCUMENTS_AT_ONCE] for at in range(0, len(texts), MAX_DOCUMENTS_AT_ONCE)]
    rows = await infer_rows(context, model, [{"query": [query], "documents": part} for part in parts], options)
    return [float(value) for row in rows for value in row["score"]]


def rank_scores(scores: Sequence[float]) -> list[tuple[int, float]]:
    """Return (number, score) of each text, the best first."""
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


def raw_scores(model: ServedModel, name: str) -> dict[str, str]:
    """Return the option that requests logits. Raises ApiError for the field `name` if the model lacks it."""
    if FUNCTION not in model.inputs:
        raise bad_field(
            name, f"{model.name} answers its scores after sigmoid or softmax alone; build it again, or leave {name} out"
        )
    return {FUNCTION: "none"}


def resize(
    vectors: list[np.ndarray], size: int | None, field: str = "dimensions", *, normalized: bool | None = None
) -> list[np.ndarray]:
    """Return the vectors truncated to `size` numbers, scaled to length 1 if `normalized` (default: if truncated).

    Raises ApiError for `field` if the vectors are shorter.
    """
    if size is not None and vectors and size > len(vectors[0]):
        raise bad_field(field, f"{field} is {size}; the vectors of this model have {len(vectors[0])}")
    truncated = [vector[:size] for vector in vectors]
    return [normalize(vector) for vector in truncated] if (normalized or (size and normalized is None)) else truncated


def normalize(vector: np.ndarray) -> np.ndarray:
    """Return the vector scaled to length 1."""
    return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))


async def infer_rows(
    context: RequestContext, model: ServedModel, rows: Sequence[Row], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return each row's outputs as numpy arrays without the batch dimension, with strings as str.

    The rows are sent in as few concurrent requests as the model's batch size allows. `options`: inputs with one value
    for all rows. Counts the tokens of the rows, if the model does. Raises ApiError; if one request of several is
    refused, the message names its first row.
    """
    parts = _parts(rows, max(1, model.batch))
    requests = [_request(context, model, part, options) for _, part in parts]

    async def ask(request: Any, first: int) -> Outputs:
        try:
            return await context.gateway.triton.infer(request, context.metadata)
        except ApiError as error:
            if model.adapter and error.status == 400 and error.message.startswith(ADAPTER.name):
                raise ApiError(404, error.message, param="model", code="model_not_found") from error
            if len(requests) > 1 and error.status == 400:
                error.message = f"of the rows from {first}: {error.message}"
            raise

    calls = [ask(request, first) for request, (first, _) in zip(requests, parts, strict=True)]
    answered = [row for answer in await _all(calls) for row in _rows(answer)]
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


def _parts(rows: Sequence[Row], size: int) -> list[tuple[int, list[Row]]]:
    """Return groups of at most `size` adjacent rows of one shape, each with the number of its first row."""
    parts: list[tuple[int, list[Row]]] = []
    for number, row in enumerate(rows):
        if parts and len(parts[-1][1]) < size and _shape(parts[-1][1][0]) == _shape(row):
            parts[-1][1].append(row)
        else:
            parts.append((number, [row]))
    return parts


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
    for row in rows if ADAPTER.name in rows[0] else ():
        model.with_adapter(row)  # refuses that of another adapter
    for name, option in model.with_adapter(options).items():
        if name in rows[0]:
            continue
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

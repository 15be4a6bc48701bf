"""Serve POST /score, /v1/score, /classify and /pooling, as vLLM's clients send them to models that do not generate.

Sources: vLLM's entrypoints/pooling/{scoring,classify,pooling}/protocol.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import (
    MAX_DOCUMENTS,
    as_list,
    class_scores,
    embed,
    embed_tokens,
    infer_rows,
    is_classifier,
    is_reranker,
    is_token_embedder,
    label_rows,
    normalize,
    raw_scores,
    relevance_scores,
    resize,
)
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.quantization import encode
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class PoolingFields(StrictBody):
    """Fields of every route."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError for a truncation length or side unlike the model's own."""
        if self.truncation_side is not None:
            model.refuse_truncation_side("truncation_side", self.truncation_side)
        if self.truncate_prompt_tokens is None:
            return {}
        if self.truncate_prompt_tokens not in (-1, model.max_input_length):
            raise bad_field(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}; {model.name} cuts texts at its own limit of "
                f"{model.max_input_length} tokens: send -1",
            )
        return {"truncate": True}

    def score_options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of a scoring model; without activation if that is switched off."""
        raw = raw_scores(model, "use_activation") if self.use_activation is False else {}
        return {**self.options(model), **raw}

    def vector_options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of an embedding model. Raises ApiError for an activation."""
        if self.use_activation is not None:
            raise bad_field(
                "use_activation", f"{model.name} answers vectors as it was built to; leave use_activation out"
            )
        return self.options(model)


class ScoreRequest(PoolingFields):
    """Two sides, by one of vLLM's pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides, equally many. Raises ApiError."""
        given = {name: value for pair in PAIRS for name in pair if (value := getattr(self, name)) is not None}
        pair = next((pair for pair in PAIRS if set(pair) == set(given)), None)
        if pair is None:
            raise bad_field(
                next(iter(given), "text_1"), "send text_1 and text_2, or queries and documents, and no others"
            )
        first, second = (as_list(given[name]) for name in pair)
        if len(first) not in (1, len(second)):
            raise bad_field(
                pair[0], f"{pair[0]} has {len(first)} texts and {pair[1]} {len(second)}; send one, or one for each"
            )
        return first * len(second) if len(first) == 1 else first, second


class ClassifyRequest(PoolingFields):
    input: Texts
    add_special_tokens: Literal[True] = True


class PoolingRequest(ClassifyRequest):
    task: str | None = None
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"


async def score(context: RequestContext) -> dict[str, Any]:
    """Serve POST /score: a score for each pair of texts, a reranker's own or the cosine of an embedder's vectors."""
    body: ScoreRequest = context.body
    first, second = body.sides()
    model = await context.model_for(
        "for scores of pairs", lambda model: is_reranker(model) or model.is_embedder, body.model
    )
    if model.is_embedder:
        vectors = [normalize(v) for v in await embed(context, model, first + second, **body.vector_options(model))]
        scores = [float(a @ b) for a, b in zip(vectors[: len(first)], vectors[len(first) :], strict=True)]
    elif len(set(first)) == 1:
        scores = await relevance_scores(context, model, first[0], second, body.score_options(model))
    else:
        rows = [{"query": [query], "documents": [text]} for query, text in zip(first, second, strict=True)]
        scores = [float(row["score"][0]) for row in await infer_rows(context, model, rows, body.score_options(model))]
    return _listed(context, model, "score", [{"object": "score", "score": score} for score in scores])


async def classify(context: RequestContext) -> dict[str, Any]:
    """Serve POST /classify: the best label of each text, and the probabilities of all labels in the model's order."""
    body: ClassifyRequest = context.body
    model = await context.model_for("for text-classification", is_classifier, body.model)
    rows = await label_rows(context, model, as_list(body.input), body.score_options(model))
    data = [
        {"label": str(row["label"][0]), "probs": class_scores(model, row), "num_classes": len(row["label"])}
        for row in rows
    ]
    return _listed(context, model, "classify", data)


async def pooling(context: RequestContext) -> dict[str, Any]:
    """Serve POST /pooling: for each text a vector, a vector per token, or the probabilities of the labels."""
    body: PoolingRequest = context.body
    model = await context.model_for("for pooling", lambda model: _pooled(model) is not None, body.model)
    if body.task not in (None, _pooled(model)):
        raise bad_field("task", f"task is {body.task!r}; {model.name} answers {_pooled(model)}")
    if body.dimensions is not None and not model.is_embedder:
        raise bad_field("dimensions", f"{model.name} does not answer one vector a text; leave dimensions out")
    arrays = await _arrays(context, model, body)
    values: list[Any] = [encode(array, body.encoding_format) for array in arrays]
    return _listed(context, model, "pool", [{"object": "pooling", "data": value} for value in values])


async def _arrays(context: RequestContext, model: ServedModel, body: PoolingRequest) -> list[np.ndarray]:
    texts = as_list(body.input)
    if model.is_embedder:
        vectors = await embed(context, model, texts, **body.vector_options(model))
        return resize(vectors, body.dimensions)
    if is_token_embedder(model):
        return await embed_tokens(context, model, texts, body.vector_options(model))
    rows = await label_rows(context, model, texts, body.score_options(model))
    return [np.array(class_scores(model, row), np.float32) for row in rows]


def _pooled(model: ServedModel) -> str | None:
    """Return vLLM's name for the model's kind of output; None if it has none."""
    if model.is_embedder:
        return "embed"
    return "token_embed" if is_token_embedder(model) else "classify" if is_classifier(model) else None


def _listed(context: RequestContext, model: ServedModel, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    used = context.record.prompt_tokens
    return {
        "id": f"{kind}-{context.record.id}",
        "object": "list",
        "created": context.record.created_at,
        "model": model.label,
        "data": [{"index": index, **entry} for index, entry in enumerate(data)],
        "usage": {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0},
    }

"""POST /score, /v1/score, /classify and /pooling, as vLLM's clients send them to models that do not generate.

Sources: vLLM's entrypoints/pooling/{scoring,classify,pooling}/protocol.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from builder.serving.gateway import rerank
from builder.serving.gateway.call import Call
from builder.serving.gateway.classification import classifies, label_scores, raw_scores
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.asking import began
from builder.serving.gateway.models import Model
from builder.serving.gateway.openai.embeddings import as_base64, embed, shortened, unit
from builder.serving.gateway.rows import ask_rows
from builder.serving.gateway.tei import per_token, token_vectors

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
Texts = str | Annotated[list[str], Field(min_length=1, max_length=rerank.MOST_DOCUMENTS)]


class Options(BaseModel):
    """Fields of every route."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None

    def options(self, model: Model) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError for a truncation length or side unlike the model's own."""
        if self.truncation_side is not None:
            model.refuse_other_side("truncation_side", self.truncation_side)
        if self.truncate_prompt_tokens is None:
            return {}
        if self.truncate_prompt_tokens not in (-1, model.max_input_length):
            raise bad_field(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens is {self.truncate_prompt_tokens}; {model.name} cuts texts at its own limit of "
                f"{model.max_input_length} tokens: send -1",
            )
        return {"truncate": True}

    def score_options(self, model: Model) -> dict[str, Any]:
        """Return the inputs of a scoring model; without activation if that is switched off."""
        raw = raw_scores(model, "use_activation") if self.use_activation is False else {}
        return {**self.options(model), **raw}

    def vector_options(self, model: Model) -> dict[str, Any]:
        """Return the inputs of an embedding model. Raises ApiError for an activation."""
        if self.use_activation is not None:
            raise bad_field(
                "use_activation", f"{model.name} answers vectors as it was built to; leave use_activation out"
            )
        return self.options(model)


class ScoreBody(Options):
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
        first, second = ([given[name]] if isinstance(given[name], str) else given[name] for name in pair)
        if len(first) not in (1, len(second)):
            raise bad_field(
                pair[0], f"{pair[0]} has {len(first)} texts and {pair[1]} {len(second)}; send one, or one for each"
            )
        return first * len(second) if len(first) == 1 else first, second


class ClassifyBody(Options):
    input: Texts
    add_special_tokens: Literal[True] = True


class PoolingBody(ClassifyBody):
    task: str | None = None
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"


async def score(call: Call) -> dict[str, Any]:
    """Serve POST /score: a score for each pair of texts, a reranker's own or the cosine of an embedder's vectors."""
    body: ScoreBody = call.body
    first, second = body.sides()
    model = await call.model_for("that scores pairs", lambda model: rerank.ranks(model) or model.embeds, body.model)
    if model.embeds:
        vectors = [unit(v) for v in await embed(call, model, first + second, **body.vector_options(model))]
        scores = [float(a @ b) for a, b in zip(vectors[: len(first)], vectors[len(first) :], strict=True)]
    elif len(set(first)) == 1:
        scores = await rerank.relevance(call, model, first[0], second, body.score_options(model))
    else:
        rows = [{"query": [query], "documents": [text]} for query, text in zip(first, second, strict=True)]
        scores = [float(row["score"][0]) for row in await ask_rows(call, model, rows, body.score_options(model))]
    return _listed(call, model, "score", [{"object": "score", "score": score} for score in scores])


async def classify(call: Call) -> dict[str, Any]:
    """Serve POST /classify: the best label of each text, and the probabilities of all labels in the model's order."""
    body: ClassifyBody = call.body
    model = await call.model_for("for text-classification", classifies, body.model)
    answers = await label_scores(call, model, _texts(body), body.score_options(model))
    data = [
        {"label": answer[0][0], "probs": _probabilities(model, answer), "num_classes": len(answer)}
        for answer in answers
    ]
    return _listed(call, model, "classify", data)


async def pooling(call: Call) -> dict[str, Any]:
    """Serve POST /pooling: for each text a vector, a vector per token, or the probabilities of the labels."""
    body: PoolingBody = call.body
    model = await call.model_for("that pools a text", lambda model: _pooled(model) is not None, body.model)
    if body.task not in (None, _pooled(model)):
        raise bad_field("task", f"task is {body.task!r}; {model.name} answers {_pooled(model)}")
    if body.dimensions is not None and not model.embeds:
        raise bad_field("dimensions", f"{model.name} does not answer one vector a text; leave dimensions out")
    arrays = await _arrays(call, model, body)
    values: list[Any] = [as_base64(array) for array in arrays] if body.encoding_format == "base64" else arrays
    return _listed(call, model, "pool", [{"object": "pooling", "data": value} for value in values])


async def _arrays(call: Call, model: Model, body: PoolingBody) -> list[np.ndarray]:
    texts = _texts(body)
    if model.embeds:
        vectors = await embed(call, model, texts, **body.vector_options(model))
        return vectors if body.dimensions is None else [unit(v) for v in shortened(vectors, body.dimensions)]
    if per_token(model):
        return await token_vectors(call, model, texts, body.vector_options(model))
    answers = await label_scores(call, model, texts, body.score_options(model))
    return [np.array(_probabilities(model, answer), np.float32) for answer in answers]


def _pooled(model: Model) -> str | None:
    """Return vLLM's name for what the model answers for a text; None if it has none."""
    if model.embeds:
        return "embed"
    return "token_embed" if per_token(model) else "classify" if classifies(model) else None


def _texts(body: ClassifyBody) -> list[str]:
    return [body.input] if isinstance(body.input, str) else body.input


def _probabilities(model: Model, answer: list[tuple[str, float]]) -> list[float]:
    """Return the scores in the order of the model's labels."""
    scores = dict(answer)
    return [scores[label] for label in model.labels or sorted(scores)]


def _listed(call: Call, model: Model, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    used = call.facts.prompt_tokens
    return {
        "id": f"{kind}-{call.facts.id}",
        "object": "list",
        "created": began(call),
        "model": model.name,
        "data": [{"index": index, **entry} for index, entry in enumerate(data)],
        "usage": {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0},
    }

"""Routes of Text Embeddings Inference, for its clients: /embed, /embed_all, /embed_sparse, /predict, /rerank, /info.

They name no model, so there must be one of the kind, or the body says which in `model`.
Source: https://huggingface.github.io/text-embeddings-inference
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from builder.distribution import own_version
from builder.gateway import rerank
from builder.gateway.call import Call
from builder.gateway.errors import ApiError, bad_field
from builder.gateway.models import Model
from builder.gateway.openai.embeddings import embed, shortened, unit
from builder.gateway.rows import ask_rows

KINDS: Mapping[int, str] = {
    400: "Validation",
    413: "Validation",
    404: "Validation",
    429: "Overloaded",
    503: "Unhealthy",
}
LARGEST = 2**31 - 1
Texts = Annotated[list[str], Field(min_length=1, max_length=4096)]


def tei_error(error: ApiError) -> Mapping[str, Any]:
    """The body of an error as TEI's clients read it."""
    return {"error": error.message, "error_type": KINDS.get(error.status, "Backend")}


class Options(BaseModel):
    """Of every route. `raw_scores` and the direction of cuts are the model's own: others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None

    def check(self) -> None:
        """Raise ApiError for what a model does not let a request say."""
        if self.truncation_direction is not None:
            raise bad_field("truncation_direction", "on which side texts are cut is fixed when a model is built")


class EmbedBody(Options):
    inputs: str | Texts
    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None


class TokensBody(Options):
    """Vectors of tokens are as the model makes them. Clients send the fields of /embed along, as those have them."""

    inputs: str | Texts
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None

    def check(self) -> None:
        super().check()
        wanted = {"normalize": self.normalize is False, "dimensions": self.dimensions, "prompt_name": self.prompt_name}
        for name in [name for name, value in wanted.items() if value not in (None, False)]:
            raise bad_field(name, f"vectors of tokens have no {name}: leave it out")


class SparseBody(Options):
    inputs: str | Texts
    prompt_name: str | None = None


class PredictBody(Options):
    inputs: str | Annotated[list[str | list[str]], Field(min_length=1, max_length=4096)]
    raw_scores: bool = False


class RerankBody(Options):
    query: str
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False


class RawBody(BaseModel):
    """Looked at further once its kind is known."""

    model_config = ConfigDict(extra="allow")


async def embed_texts(call: Call) -> list[np.ndarray]:
    """POST /embed: a vector a text."""
    body: EmbedBody = call.body
    body.check()
    model = await call.model_for("for embeddings", lambda model: model.embeds, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    vectors = await embed(call, model, texts, prompt_name=body.prompt_name, truncate=body.truncate)
    if body.dimensions is not None:
        vectors = shortened(vectors, body.dimensions)
    return [unit(vector) if body.normalize else vector for vector in vectors]


async def embed_tokens(call: Call) -> list[np.ndarray]:
    """POST /embed_all: a vector a token, of a model that does not pool them, and so has no prompts."""
    body: TokensBody = call.body
    body.check()
    model = await call.model_for("for a vector a token", _per_token, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    options = {} if body.truncate is None else {"truncate": body.truncate}
    answers = []
    for text in texts:  # texts of unequal length have no common shape
        answers += await ask_rows(call, model, [{"text_input": [text]}], options)
    return [row["embedding"] for row in answers]


async def embed_sparse(call: Call) -> list[list[dict[str, Any]]]:
    """POST /embed_sparse: of each text the tokens that matter, with their weights, of a model that tells them."""
    body: SparseBody = call.body
    body.check()
    model = await call.model_for("for sparse embeddings", _sparse, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    stated = {"prompt_name": body.prompt_name, "truncate": body.truncate}
    options = {name: value for name, value in stated.items() if value is not None}
    model.refuse_others(options)
    rows = await ask_rows(call, model, [{"text_input": [text]} for text in texts], options)
    return [
        [
            {"index": int(index), "value": float(value)}
            for index, value in zip(row["indices"], row["values"], strict=True)
            if index >= 0  # a row of a request may have fewer than another
        ]
        for row in rows
    ]


async def predict(call: Call) -> list[Any]:
    """POST /predict: every label of a text, or of a pair, with its score."""
    body: PredictBody = call.body
    body.check()
    _refuse_raw(body.raw_scores)
    model = await call.model_for("for text-classification", _classifies, body.model)
    single = isinstance(body.inputs, str) or (len(body.inputs) <= 2 and all(isinstance(i, str) for i in body.inputs))
    inputs: list[Any] = [body.inputs] if single else list(body.inputs)
    options = {"top_k": LARGEST, **({} if body.truncate is None else {"truncate": body.truncate})}
    rows = await ask_rows(call, model, [_pair(number, value) for number, value in enumerate(inputs)], options)
    answers = [
        [{"score": float(s), "label": label} for label, s in zip(row["label"], row["score"], strict=True)]
        for row in rows
    ]
    return answers[0] if single else answers


async def rank(call: Call) -> list[dict[str, Any]]:
    """POST /rerank, TEI's kind: the most relevant text first."""
    body: RerankBody = call.body
    body.check()
    _refuse_raw(body.raw_scores)
    model = await call.model_for("for text-ranking", rerank.ranks, body.model)
    scored = await rerank.score(call, model, body.query, body.texts, body.truncate)
    texts = [{"text": text} if body.return_text else {} for text in body.texts]
    return [{"index": i, **texts[i], "score": s} for i, s in scored]


async def info(call: Call) -> dict[str, Any]:
    """GET /info: of the first model that TEI would serve."""
    models = [model for model in await call.gateway.models.all() if _kind(model)]
    if not models:
        raise ApiError(404, "there is no model for embeddings, classification or ranking")
    model = models[0]
    call.facts.model = model.name
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": _kind(model),
        "max_concurrent_requests": None,
        "max_input_length": model.max_input_length,
        "max_client_batch_size": 4096,
        "auto_truncate": False,
        "version": own_version(),
    }


def _kind(model: Model) -> dict[str, Any] | None:
    labels = {"id2label": dict(enumerate(model.labels)), "label2id": {name: i for i, name in enumerate(model.labels)}}
    if model.embeds or _sparse(model):
        return {"embedding": {"pooling": "model" if model.embeds else "splade"}}
    if rerank.ranks(model):
        return {"reranker": labels}
    return {"classifier": labels} if _classifies(model) else None


def _classifies(model: Model) -> bool:
    return model.task == "text-classification"


def _per_token(model: Model) -> bool:
    output = model.outputs.get("embedding")
    return output is not None and len(output.dims) == 2


def _sparse(model: Model) -> bool:
    return {"indices", "values"} <= set(model.outputs)


def _pair(number: int, value: str | list[str]) -> dict[str, list[str]]:
    texts = [value] if isinstance(value, str) else value
    if not 1 <= len(texts) <= 2:
        raise bad_field("inputs", f"inputs[{number}] has {len(texts)} texts; send one, or a pair")
    return dict(zip(("text_input", "text_pair"), ([text] for text in texts), strict=False))


def _refuse_raw(raw_scores: bool) -> None:
    if raw_scores:
        raise bad_field("raw_scores", "raw_scores: models answer scores after the function that they were built with")

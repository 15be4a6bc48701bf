"""Serve the routes of Text Embeddings Inference (TEI) to its clients.

They are /, /embed, /embed_all, /embed_sparse, /predict, /rerank, /similarity and /info. Requests name no model, so
either there is one model of the kind, or the body names one in `model`.
Source: https://huggingface.github.io/text-embeddings-inference
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from builder.common.distribution import own_version
from builder.serving.gateway.catalogue import select_model
from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import (
    MAX_TEXTS,
    Sentences,
    Texts,
    as_list,
    embed,
    embed_tokens,
    infer_rows,
    is_classifier,
    is_reranker,
    is_sparse_embedder,
    is_token_embedder,
    label_rows,
    label_scores,
    rank_scores,
    raw_scores,
    relevance_scores,
    resize,
    similarities,
    sparse_weights,
)
from builder.serving.gateway.errors import ApiError, bad_field, tei_error
from builder.serving.gateway.input_types import prompt_options
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody


@contextmanager
def tei_errors() -> Iterator[None]:
    """Give errors TEI's shape, on a route that other clients use too."""
    try:
        yield
    except ApiError as error:  # not changed, since requests of other routes may wait for the same load
        raise ApiError(
            error.status,
            error.message,
            param=error.param,
            code=error.code,
            retry_after=error.retry_after,
            shape=tei_error,
        ) from error


class TruncationFields(StrictBody):
    """Fields for texts that are too long. The model decides which side is cut."""

    truncate: bool | None = None
    truncation_direction: Literal["Left", "left", "Right", "right"] | None = None

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError if it cannot truncate on the requested side."""
        if self.truncation_direction is not None:
            model.refuse_truncation_side("truncation_direction", self.truncation_direction.lower())
        return {} if self.truncate is None else {"truncate": self.truncate}


class TeiRequest(TruncationFields):
    """Fields of every route."""

    model: str | None = None


class TeiTextsRequest(TeiRequest):
    inputs: str | Texts
    prompt_name: str | None = None


class TeiEmbedRequest(TeiTextsRequest):
    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)


class TeiEmbedAllRequest(TeiTextsRequest):
    """Vectors of tokens are returned unchanged. Clients also send the fields of /embed, with its defaults."""

    normalize: bool | None = None
    dimensions: int | None = None

    def options(self, model: ServedModel) -> dict[str, Any]:
        requested = {
            "normalize": self.normalize is False,
            "dimensions": self.dimensions,
        }
        for name in [name for name, value in requested.items() if value not in (None, False)]:
            raise bad_field(name, f"vectors of tokens have no {name}: leave it out")
        return super().options(model)


class TeiPredictRequest(TeiRequest):
    inputs: str | Annotated[list[str | list[str]], Field(min_length=1, max_length=MAX_TEXTS)]
    raw_scores: bool = False


class TeiRerankRequest(TeiRequest):
    query: str
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False


class SimilarityParameters(TruncationFields):
    prompt_name: str | None = None


class TeiSimilarityRequest(StrictBody):
    model: str | None = None
    inputs: Sentences
    parameters: SimilarityParameters | None = None


async def embed_texts(context: RequestContext) -> list[np.ndarray]:
    """Serve POST /embed: one vector per text."""
    body: TeiEmbedRequest = context.body
    model = await context.model_for("for embeddings", lambda model: model.is_embedder, body.model)
    vectors = await embed(context, model, as_list(body.inputs), prompt_name=body.prompt_name, **body.options(model))
    return resize(vectors, body.dimensions, normalized=body.normalize)


async def embed_all(context: RequestContext) -> list[np.ndarray]:
    """Serve POST /embed_all: one vector per token."""
    body: TeiEmbedAllRequest = context.body
    model = await context.model_for("for vectors of tokens", is_token_embedder, body.model)
    options = {**body.options(model), **prompt_options(model, body.prompt_name)}
    model.refuse_unknown_inputs(options)
    return await embed_tokens(context, model, as_list(body.inputs), options)


async def embed_sparse(context: RequestContext) -> list[list[dict[str, Any]]]:
    """Serve POST /embed_sparse: the tokens that matter in each text, with their weights."""
    body: TeiTextsRequest = context.body
    model = await context.model_for("for sparse embeddings", is_sparse_embedder, body.model)
    options = {**body.options(model), **prompt_options(model, body.prompt_name)}
    model.refuse_unknown_inputs(options)
    rows = await infer_rows(context, model, [{"text_input": [text]} for text in as_list(body.inputs)], options)
    return [sparse_weights(row) for row in rows]


async def predict(context: RequestContext) -> list[Any]:
    """Serve POST /predict: every label of a text, or of a pair, with its score."""
    body: TeiPredictRequest = context.body
    model = await context.model_for("for text-classification", is_classifier, body.model)
    single = isinstance(body.inputs, str) or (len(body.inputs) <= 2 and all(isinstance(i, str) for i in body.inputs))
    inputs: list[Any] = [body.inputs] if single else list(body.inputs)
    options = {**body.options(model), **(raw_scores(model, "raw_scores") if body.raw_scores else {})}
    rows = await label_rows(context, model, inputs, options)
    answers = [[{"score": score, "label": label} for label, score in label_scores(row)] for row in rows]
    return answers[0] if single else answers


async def rank(context: RequestContext) -> list[dict[str, Any]]:
    """Serve POST /rerank in TEI's shape: the most relevant text first."""
    body: TeiRerankRequest = context.body
    model = await context.model_for("for text-ranking", is_reranker, body.model)
    options = {**body.options(model), **(raw_scores(model, "raw_scores") if body.raw_scores else {})}
    scores = await relevance_scores(context, model, body.query, body.texts, options)
    texts = [{"text": text} if body.return_text else {} for text in body.texts]
    return [{"index": i, **texts[i], "score": score} for i, score in rank_scores(scores)]


async def similarity(context: RequestContext) -> list[float]:
    """Serve POST /similarity: the similarity of each sentence to the source sentence, from -1 to 1."""
    body: TeiSimilarityRequest = context.body
    parameters = body.parameters or SimilarityParameters()
    model = await context.model_for("for embeddings", lambda model: model.is_embedder, body.model)
    options = {"prompt_name": parameters.prompt_name, **parameters.options(model)}
    return await similarities(context, model, body.inputs, **options)


async def default(context: RequestContext) -> Any:
    """Serve POST /: /embed, /embed_sparse, /predict or /rerank, as the body or else the model's kind implies."""
    fields = context.body.model_extra
    if "texts" in fields:
        return await rank(context.with_body(TeiRerankRequest))
    if isinstance(fields.get("inputs"), dict):
        return await similarity(context.with_body(TeiSimilarityRequest))
    name = fields["model"] if isinstance(fields.get("model"), str) else None
    model = await select_model(context.gateway.models, "with a TEI route", lambda model: _kind(model) is not None, name)
    if model.is_embedder:
        return await embed_texts(context.with_body(TeiEmbedRequest))
    if is_sparse_embedder(model):
        return await embed_sparse(context.with_body(TeiTextsRequest))
    if is_classifier(model):
        return await predict(context.with_body(TeiPredictRequest))
    return await rank(context.with_body(TeiRerankRequest))


async def info(context: RequestContext) -> dict[str, Any]:
    """Serve GET /info: a description of the first model that TEI would serve."""
    models = [model for model in await context.gateway.models.all() if _kind(model)]
    if not models:
        raise ApiError(404, "there is no model for embeddings, classification or ranking")
    model = models[0]
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


def _kind(model: ServedModel) -> dict[str, Any] | None:
    labels = {"id2label": dict(enumerate(model.labels)), "label2id": {name: i for i, name in enumerate(model.labels)}}
    if model.is_embedder or is_sparse_embedder(model):
        return {"embedding": {"pooling": "model" if model.is_embedder else "splade"}}
    if is_reranker(model):
        return {"reranker": labels}
    return {"classifier": labels} if is_classifier(model) else None

"""POST /v1/embeddings: one vector per text, as numbers or as base64 of little-endian 32-bit floats."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.rows import infer_rows
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.token_ids import Vocabulary
from builder.serving.gateway.validation import StrictBody

MAX_TEXTS = 2048  # OpenAI's own limit


class EmbeddingRequest(StrictBody):
    model: str | None = None
    input: str | Annotated[list[Any], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None  # for a checkpoint with prompts
    truncate: bool | None = None
    user: str | None = None


async def create_embedding(context: RequestContext) -> dict[str, Any]:
    """Embed all texts; the vectors keep their order."""
    body: EmbeddingRequest = context.body
    model = await context.model_for("for embeddings", lambda model: model.is_embedder, body.model)
    texts = _texts(body.input, context.gateway.settings.token_ids)
    vectors = await embed(context, model, texts, prompt_name=body.prompt_name, truncate=body.truncate)
    if body.dimensions is not None:
        vectors = [normalize(vector) for vector in truncate_vectors(vectors, body.dimensions)]
    values = [as_base64(vector) for vector in vectors] if body.encoding_format == "base64" else vectors
    data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
    used = context.record.prompt_tokens
    return {"object": "list", "data": data, "model": model.name, "usage": {"prompt_tokens": used, "total_tokens": used}}


def refuse_other_tasks(model: ServedModel) -> None:
    """Raise ApiError for a model that does not answer vectors."""
    if not model.is_embedder:
        raise bad_field(
            "model", f"{model.name} is a model for {model.task}; it does not answer one vector a text: see /v1/models"
        )


async def embed(context: RequestContext, model: ServedModel, texts: list[str], **options: Any) -> list[np.ndarray]:
    """Return one float32 vector per text. `options` that are None are left to the model."""
    refuse_other_tasks(model)
    explicit = {name: value for name, value in options.items() if value is not None}
    model.refuse_unknown_inputs(explicit)
    rows = await infer_rows(context, model, [{"text_input": [text]} for text in texts], explicit)
    return [row["embedding"] for row in rows]


def truncate_vectors(vectors: list[np.ndarray], size: int, name: str = "dimensions") -> list[np.ndarray]:
    """Return the first `size` numbers of each vector. Raises ApiError if the vectors are shorter."""
    if vectors and size > len(vectors[0]):
        raise bad_field(name, f"{name} is {size}; the vectors of this model have {len(vectors[0])}")
    return [vector[:size] for vector in vectors]


def normalize(vector: np.ndarray) -> np.ndarray:
    """Return the vector scaled to length 1."""
    return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))


def _texts(inputs: Any, vocabulary: Vocabulary | None) -> list[str]:
    """Return the texts of an input: one or several, or the token ids of one or several."""
    single = isinstance(inputs, str) or isinstance(inputs[0], int)
    return [_text(number, one, vocabulary) for number, one in enumerate([inputs] if single else inputs)]


def _text(number: int, value: Any, vocabulary: Vocabulary | None) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise bad_field("input", f"input[{number}] is neither a text nor a list of token ids")
    if vocabulary is None:
        raise bad_field(
            "input",
            "input holds token ids, and the models here have tokenisers of their own: send texts (LangChain: "
            "check_embedding_ctx_length=False), or start the gateway with --token-ids and the vocabulary they are of",
        )
    try:
        return vocabulary.text(value)
    except KeyError as error:
        raise bad_field(
            "input", f"input[{number}] holds {error.args[0]}, which is outside the vocabulary {vocabulary.name}"
        ) from error


def as_base64(vector: np.ndarray) -> str:
    """Return the vector as little-endian 32-bit floats in base64."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()

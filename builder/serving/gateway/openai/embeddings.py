"""Serve POST /v1/embeddings: one vector per text, as numbers or as base64 of little-endian 32-bit floats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import as_base64, embed, resize
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.settings import Vocabulary
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
    single = isinstance(body.input, str) or isinstance(body.input[0], int)  # a text, or its token ids
    vocabulary = context.gateway.settings.token_ids
    texts = [_text(number, one, vocabulary) for number, one in enumerate([body.input] if single else body.input)]
    vectors = await embed(context, model, texts, prompt_name=body.prompt_name, truncate=body.truncate)
    vectors = resize(vectors, body.dimensions)
    values = [as_base64(vector) for vector in vectors] if body.encoding_format == "base64" else vectors
    data = [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)]
    used = context.record.prompt_tokens
    return {"object": "list", "data": data, "model": model.name, "usage": {"prompt_tokens": used, "total_tokens": used}}


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

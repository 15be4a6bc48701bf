"""Serve POST /v1/embeddings: one vector per text, as numbers or as base64 of little-endian 32-bit floats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import embed, resize
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.input_types import InputType, text_options
from builder.serving.gateway.quantization import PRECISIONS, Encoding, encode, quantize, to_base64
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.settings import Vocabulary
from builder.serving.gateway.validation import StrictBody

MAX_TEXTS = 2048  # OpenAI's own limit


class EmbeddingRequest(StrictBody):
    """OpenAI's body with the fields of Jina (`task`, `embedding_type`), Voyage (`output_...`) and NVIDIA NIM."""

    model: str | None = None
    input: str | Annotated[list[Any], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Encoding | None = None
    embedding_type: Encoding | None = None
    output_dtype: Encoding | None = None
    dimensions: int | None = Field(None, ge=1)
    output_dimension: int | None = Field(None, ge=1)
    input_type: InputType | None = None
    task: InputType | None = None
    prompt_name: str | None = None  # for a checkpoint with prompts
    prompt: str | None = None
    chunking: Literal["none", "mean", "max"] | None = None
    chunk_overlap: int | None = Field(None, ge=0)
    late_chunking: bool | None = None  # Jina's: the inputs are parts of one document, which is read at once
    truncate: bool | Literal["NONE", "END"] | None = None
    truncation: bool | None = None
    normalized: bool | None = None
    user: str | None = None

    def encoded(self, vector: np.ndarray) -> Any:
        """Return the vector as requested; Voyage's clients ask for a type and for its bytes in base64."""
        if self.encoding_format == "base64" and self.output_dtype in PRECISIONS:
            return to_base64(quantize(vector, self.output_dtype))
        if self.encoding_format == "base64" and self.output_dtype == "float":
            return encode(vector, "base64")
        return encode(vector, self.one_of("encoding_format", "embedding_type", "output_dtype") or "float")

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError."""
        truncate = self.one_of("truncate", "truncation")
        late = {"chunking": "late"} if self.late_chunking else {}
        own = {
            "truncate": truncate if truncate is None or isinstance(truncate, bool) else truncate == "END",
            "prompt": self.prompt,
            "chunking": self.chunking,
            "chunk_overlap": self.chunk_overlap,
            **late,
        }
        if truncate == "END":
            model.refuse_truncation_side("truncate", "right")
        return {**own, **text_options(model, self.prompt_name, self.one_of("input_type", "task"))}


async def create_embedding(context: RequestContext) -> dict[str, Any]:
    """Embed all texts; the vectors keep their order."""
    body: EmbeddingRequest = context.body
    model = await context.model_for("for embeddings", lambda model: model.is_embedder, body.model)
    single = isinstance(body.input, str) or isinstance(body.input[0], int)  # a text, or its token ids
    vocabulary = context.gateway.settings.token_ids
    texts = [_text(number, one, vocabulary) for number, one in enumerate([body.input] if single else body.input)]
    if body.late_chunking:
        _refuse_late_chunking(model, body, len(texts))
    size = body.one_of("dimensions", "output_dimension")
    vectors = await embed(context, model, texts, **body.options(model))
    vectors = resize(vectors, size, "dimensions" if body.dimensions else "output_dimension", normalized=body.normalized)
    data = [{"object": "embedding", "index": i, "embedding": body.encoded(vector)} for i, vector in enumerate(vectors)]
    used = context.record.prompt_tokens
    return {
        "object": "list",
        "data": data,
        "model": model.label,
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }


def _refuse_late_chunking(model: ServedModel, body: EmbeddingRequest, texts: int) -> None:
    """Raise ApiError if the model cannot read the texts as one document, which are the rows of one call."""
    if not model.has_late_chunking:
        raise bad_field(
            "late_chunking", f"{model.name} was built without --late-chunking; build it so, or leave late_chunking out"
        )
    other = next((name for name in ("chunking", "chunk_overlap") if getattr(body, name) is not None), None)
    if other is not None:
        raise bad_field(other, f"{other} splits long texts, and late_chunking joins them; send one of them")
    most = max(1, model.batch)
    if texts > most:
        raise bad_field("late_chunking", f"input has {texts} texts; {model.name} takes at most {most} of one document")


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

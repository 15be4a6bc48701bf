"""Embed texts for all embedding routes: size, scale, compare and encode their vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.rows import infer_rows
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody


class Sentences(StrictBody):
    """Sentences to compare, of TEI's POST /similarity and Hugging Face's sentence-similarity."""

    source_sentence: str
    sentences: Annotated[list[str], Field(min_length=1, max_length=4096)]


async def embed(context: RequestContext, model: ServedModel, texts: Sequence[str], **options: Any) -> list[np.ndarray]:
    """Return one float32 vector per text. `options` that are None are left to the model. Raises ApiError."""
    if not model.is_embedder:
        message = f"{model.name} is a model for {model.task}; it does not answer one vector a text: see /v1/models"
        raise bad_field("model", message)
    explicit = {name: value for name, value in options.items() if value is not None}
    model.refuse_unknown_inputs(explicit)
    rows = await infer_rows(context, model, [{"text_input": [text]} for text in texts], explicit)
    return [row["embedding"] for row in rows]


async def similarities(context: RequestContext, model: ServedModel, inputs: Sentences, **options: Any) -> list[float]:
    """Return the cosine of each sentence's vector with that of the source sentence."""
    source, *others = await embed(context, model, [inputs.source_sentence, *inputs.sentences], **options)
    return [float(normalize(source) @ normalize(other)) for other in others]


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


def as_base64(vector: np.ndarray) -> str:
    """Return the vector as little-endian 32-bit floats in base64."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()

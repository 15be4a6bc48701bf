"""Serve POST /v1/embed and /v2/embed, as Cohere's clients send them: vectors in several types at once.

Source: https://docs.cohere.com/reference/embed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.openai.embeddings import MAX_TEXTS
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody
from builder.serving.gateway.vectors import as_base64, embed, normalize, resize

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering"]
PROMPTS: Mapping[str, tuple[str, ...]] = {  # prompt names of sentence-transformers checkpoints, by input type
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
SIDES = {"START": "left", "END": "right"}


class CohereTextPart(StrictBody):
    type: Literal["text"]
    text: str


class CohereInput(StrictBody):
    content: Annotated[list[CohereTextPart], Field(min_length=1)]


class CohereEmbedRequest(StrictBody):
    """Body of either version. Models here read texts, and truncate them at their own limit."""

    model: str | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    inputs: Annotated[list[CohereInput], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    input_type: InputType | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = None
    output_dimension: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None

    def all_texts(self) -> list[str]:
        """Return the texts; the parts of one input are joined by newlines. Raises ApiError."""
        if (self.texts is None) == (self.inputs is None):
            raise bad_field("texts", "send texts, or inputs with parts of text")
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in entry.content) for entry in self.inputs or []]

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError if it cannot truncate on the requested side."""
        if self.truncate in SIDES:
            model.refuse_truncation_side("truncate", SIDES[self.truncate])
        names = [name for name in PROMPTS.get(self.input_type or "", ()) if name in model.prompts]
        return {"truncate": self.truncate != "NONE", "prompt_name": names[0] if names else None}


async def embed_v1(context: RequestContext) -> dict[str, Any]:
    """Serve POST /v1/embed: the vectors as numbers, unless the request names types."""
    body: CohereEmbedRequest = context.body
    texts, vectors = await _vectors(context, body)
    if body.embedding_types is not None:
        return _by_type(context, body.embedding_types, texts, vectors)
    return {**_head(context, "embeddings_floats", texts), "embeddings": vectors}


async def embed_v2(context: RequestContext) -> dict[str, Any]:
    """Serve POST /v2/embed: the vectors by type, as numbers unless the request names others."""
    body: CohereEmbedRequest = context.body
    texts, vectors = await _vectors(context, body)
    return _by_type(context, body.embedding_types or ["float"], texts, vectors)


async def _vectors(context: RequestContext, body: CohereEmbedRequest) -> tuple[list[str], list[np.ndarray]]:
    texts = body.all_texts()
    model = await context.model_for("for embeddings", lambda model: model.is_embedder, body.model)
    vectors = await embed(context, model, texts, **body.options(model))
    return texts, resize(vectors, body.output_dimension, "output_dimension")


def _by_type(
    context: RequestContext, types: list[EmbeddingType], texts: list[str], vectors: list[np.ndarray]
) -> dict[str, Any]:
    embeddings = {kind: [CONVERTED[kind](vector) for vector in vectors] for kind in types}
    return {**_head(context, "embeddings_by_type", texts), "embeddings": embeddings}


def _head(context: RequestContext, response_type: str, texts: list[str]) -> dict[str, Any]:
    version = {"version": "1" if context.record.path.startswith("/v1") else "2"}
    meta = {"api_version": version, "billed_units": {"input_tokens": context.record.prompt_tokens}}
    return {"id": context.record.id, "response_type": response_type, "texts": texts, "meta": meta}


def _int8(vector: np.ndarray) -> np.ndarray:
    """Return the vector, scaled to length 1, times 127: one scale for all texts, so that products compare."""
    return np.round(normalize(vector) * 127).astype(np.int8)


def _uint8(vector: np.ndarray) -> np.ndarray:
    return (_int8(vector).astype(np.int16) + 128).astype(np.uint8)


def _ubinary(vector: np.ndarray) -> np.ndarray:
    """Return one bit per number, 1 if it is above zero; eight to a byte, most significant bit first."""
    if len(vector) % 8:
        raise bad_field("embedding_types", f"the vectors have {len(vector)} numbers; binary needs a multiple of 8")
    return np.packbits(vector > 0)


def _binary(vector: np.ndarray) -> np.ndarray:
    return (_ubinary(vector).astype(np.int16) - 128).astype(np.int8)


CONVERTED: Mapping[EmbeddingType, Callable[[np.ndarray], Any]] = {
    "float": lambda vector: vector,
    "int8": _int8,
    "uint8": _uint8,
    "binary": _binary,
    "ubinary": _ubinary,
    "base64": as_base64,
}

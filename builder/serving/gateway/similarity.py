"""Similarity of a sentence to others, for TEI's POST /similarity and Hugging Face's sentence-similarity."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.openai.embeddings import embed, normalize
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody

MAX_SENTENCES = 4096


class Sentences(StrictBody):
    source_sentence: str
    sentences: Annotated[list[str], Field(min_length=1, max_length=MAX_SENTENCES)]


async def similarities(context: RequestContext, model: ServedModel, inputs: Sentences, **options: Any) -> list[float]:
    """Return the cosine of each sentence's vector with that of the source sentence."""
    source, *others = await embed(context, model, [inputs.source_sentence, *inputs.sentences], **options)
    return [float(normalize(source) @ normalize(other)) for other in others]

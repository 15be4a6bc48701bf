"""Similarity of a sentence to others, for TEI's POST /similarity and Hugging Face's sentence-similarity."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from builder.serving.gateway.call import Call
from builder.serving.gateway.models import Model
from builder.serving.gateway.openai.embeddings import embed, unit

MAX_SENTENCES = 4096


class Sentences(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    source_sentence: str
    sentences: Annotated[list[str], Field(min_length=1, max_length=MAX_SENTENCES)]


async def similarities(call: Call, model: Model, inputs: Sentences, **options: Any) -> list[float]:
    """Return the cosine of each sentence's vector with that of the source sentence."""
    source, *others = await embed(call, model, [inputs.source_sentence, *inputs.sentences], **options)
    return [float(unit(source) @ unit(other)) for other in others]

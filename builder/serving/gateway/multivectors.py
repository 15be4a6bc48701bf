"""Serve POST /v1/multi-vector: one vector a token, for the clients of Jina's route of that name.

Source: https://api.jina.ai/redoc#tag/search-foundation-models
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import as_list, infer_rows, is_token_embedder, token_vectors
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.input_types import InputType, text_options
from builder.serving.gateway.openai.embeddings import MAX_TEXTS
from builder.serving.gateway.quantization import Encoding, encode
from builder.serving.gateway.validation import StrictBody


class MultiVectorRequest(StrictBody):
    model: str | None = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
    input_type: InputType | None = None
    prompt_name: str | None = None
    encoding_format: Encoding = "float"
    embedding_type: Encoding | None = None  # Jina's name of encoding_format
    truncate: bool | None = None
    return_offsets: bool = False
    user: str | None = None


async def create_multi_vectors(context: RequestContext) -> dict[str, Any]:
    """Embed each token of every text."""
    body: MultiVectorRequest = context.body
    model = await context.model_for("for vectors of tokens", is_token_embedder, body.model)
    options = text_options(model, body.prompt_name, body.input_type)
    options |= {} if body.truncate is None else {"truncate": body.truncate}
    model.refuse_unknown_inputs(options)
    if body.return_offsets and "offsets" not in model.outputs:
        raise bad_field("return_offsets", f"{model.name} answers no offsets; leave return_offsets out")
    encoding, data = body.embedding_type or body.encoding_format, []
    for index, text in enumerate(as_list(body.input)):
        (row,) = await infer_rows(context, model, [{"text_input": [text]}], options)
        vectors = token_vectors(row)
        entry = {"object": "embeddings", "index": index, "embeddings": [encode(vector, encoding) for vector in vectors]}
        data.append({**entry, **({"offsets": row["offsets"][: len(vectors)]} if body.return_offsets else {})})
    used = context.record.prompt_tokens
    return {
        "object": "list",
        "data": data,
        "model": model.label,
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }

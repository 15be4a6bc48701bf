"""The sentence that names a wrong field of a request, whatever pydantic lists."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.openai.embeddings import EmbeddingRequest as Embeddings
from builder.serving.gateway.tei import TeiEmbedRequest, TeiPredictRequest
from builder.serving.gateway.validation import validate_body


@pytest.mark.parametrize(
    ("schema", "body", "field", "words"),
    [
        (Embeddings, {"input": []}, "input", ("input: ", "at least 1 item")),
        (Embeddings, {"input": 3}, "input", ("input: ", "a valid string or a valid list")),
        (Embeddings, {}, "input", ("input: Field required",)),
        (Embeddings, {"input": "a", "other": 1}, "other", ("other: ", "not permitted")),
        (Embeddings, {"input": "a", "dimensions": 0}, "dimensions", ("dimensions: ", "greater than or equal to 1")),
        (TeiEmbedRequest, {"inputs": []}, "inputs", ("inputs: ", "at least 1 item")),
        (TeiEmbedRequest, {"inputs": ["a", 1]}, "inputs", ("inputs.1: ", "a valid string")),
        (TeiPredictRequest, {"inputs": [["a", 1]]}, "inputs", ("inputs.0.1: ", "a valid string")),
    ],
)
def test_validation_names_the_field_without_pydantic_types(
    schema: type[BaseModel], body: dict[str, Any], field: str, words: tuple[str, ...]
) -> None:
    """Regression: `input: []` was answered with "input.str: Input should be a valid string"."""
    with pytest.raises(ApiError) as refused:
        validate_body(schema, {"model": "m", **body})
    assert (refused.value.status, refused.value.param) == (400, field)
    assert all(word in refused.value.message for word in words), refused.value.message
    assert ".str" not in refused.value.message

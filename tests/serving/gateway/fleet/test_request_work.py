"""Work of a request, and the beginning of its prompt."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2

from builder.runtime.fields import Field
from builder.serving.gateway.fleet.request_work import (
    DEFAULT_ANSWER_TOKENS,
    MAX_ANSWER_TOKENS,
    PREFIX_BYTES,
    generation_work,
)
from builder.serving.gateway.fleet.request_work import encoding_work as work_of
from builder.serving.gateway.tensors import add_tensor

TYPES = {str: "TYPE_STRING", int: "TYPE_INT32", bool: "TYPE_BOOL"}
LONG = "The museum in Oslo. " * 40


def _request(model: str = "writes", **inputs: Any) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        add_tensor(request, Field(name, TYPES[type(values[0])]), values, (len(values),))
    return request


def test_work_is_the_prompt_and_the_longest_answers() -> None:
    assert work_of(_request(text_input="x" * 400)).prompt == 102
    assert work_of(_request(text_input="x" * 400)).answer == 0
    assert generation_work(_request(text_input="x", max_tokens=30, n=4)).answer == 120
    streamed = generation_work(_request(text_input="x" * 400, max_tokens=30, stream=True))
    assert streamed.streams
    assert streamed.until_first_answer == streamed.prompt
    whole = generation_work(_request(text_input="x" * 400, max_tokens=30, stream=False))
    assert not whole.streams
    assert whole.until_first_answer == whole.prompt + 30
    assert generation_work(_request(text_input="x")).answer == DEFAULT_ANSWER_TOKENS
    assert generation_work(_request(input_ids=list(range(50)), max_tokens=-1)).answer == 0


def test_answer_counts_up_to_a_length_that_is_usual() -> None:
    """Regression: one request with max_tokens of a billion kept its server without others, and filled no other one."""
    assert generation_work(_request(text_input="x", max_tokens=10**9)).answer == MAX_ANSWER_TOKENS
    assert generation_work(_request(text_input="x", max_tokens=10**9, n=3)).answer == 3 * MAX_ANSWER_TOKENS


def test_prefix_is_equal_where_the_cache_is() -> None:
    first = generation_work(_request(text_input=LONG + "Where?")).prefix
    assert first
    assert generation_work(_request(text_input=LONG + "A longer question?", max_tokens=9)).prefix == first
    others = [
        _request("speaks", text_input=LONG),
        _request(text_input=LONG, lora_name="poems"),
        _request(text_input="x" + LONG),
    ]
    assert first not in [generation_work(request).prefix for request in others]


def test_short_prompt_has_no_prefix() -> None:
    assert generation_work(_request(text_input="x" * (PREFIX_BYTES - 1))).prefix == b""
    assert generation_work(_request(text_input="x" * PREFIX_BYTES)).prefix

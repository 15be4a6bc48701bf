"""Cohere's embeddings: number types, input kinds, and refusals. Its own client: tests/served."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.serving.gateway.fake_triton import MODELS, FakeTriton
from tests.serving.gateway.requests import fetch, gateway


def test_cohere_embed_v1_and_v2_shapes() -> None:
    """Regression: neither route was there."""
    first = fetch("/v1/embed", {"model": "embeds", "texts": ["xxxx", "x"]}).json
    assert (first["response_type"], first["embeddings"][0]) == ("embeddings_floats", [4, 3, 0, 1])
    assert (first["texts"], first["meta"]["billed_units"]) == (["xxxx", "x"], {"input_tokens": 5})
    typed = fetch("/v1/embed", {"texts": ["xxxx"], "embedding_types": ["float"]}).json
    assert (typed["response_type"], typed["embeddings"]) == ("embeddings_by_type", {"float": [[4, 3, 0, 1]]})
    second = fetch("/v2/embed", {"model": "embeds", "texts": ["xxxx"], "input_type": "clustering"}).json
    assert second["embeddings"] == {"float": [[4, 3, 0, 1]]}
    parts = {"content": [{"type": "text", "text": "xx"}, {"type": "text", "text": "x"}]}
    assert fetch("/v2/embed", {"model": "embeds", "inputs": [parts]}).json["texts"] == ["xx\nx"]


def test_cohere_truncates_vectors_to_output_dimension() -> None:
    body = {"texts": ["xxxx"], "output_dimension": 2}
    assert fetch("/v2/embed", body).json["embeddings"]["float"] == [pytest.approx([0.8, 0.6])]
    assert fetch("/v2/embed", {**body, "output_dimension": 5}).error["param"] == "output_dimension"


def test_cohere_serialises_every_number_type() -> None:
    types = ["int8", "uint8", "binary", "ubinary", "base64"]
    answer = fetch("/v2/embed", {"texts": ["xxxx"], "embedding_types": types}).json["embeddings"]
    assert answer["int8"] == [[100, 75, 0, 25]]
    assert answer["uint8"] == [[228, 203, 128, 153]]
    assert (answer["ubinary"], answer["binary"]) == ([[0b11010000]], [[0b11010000 - 128]])
    assert np.frombuffer(base64.b64decode(answer["base64"][0]), "<f4").tolist() == [4, 3, 0, 1]


def test_cohere_input_type_selects_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    task, inputs, outputs, parameters = MODELS["embeds"]
    prompted = next(field for field in MODELS["topics"][1] if field.name == "text_pair")
    inputs = (*inputs, type(prompted)("prompt_name", "TYPE_STRING", optional=True))
    monkeypatch.setitem(MODELS, "embeds", (task, inputs, outputs, {**parameters, "prompts": '["passage", "query"]'}))
    triton = FakeTriton()
    app = gateway(triton)
    for input_type in ("search_query", "search_document", "clustering"):
        assert fetch("/v2/embed", {"texts": ["x"], "input_type": input_type}, app).status == 200
    names = [request.get("prompt_name") for request in triton.requests]
    assert names == [[["query"]], [["passage"]], None]


@pytest.mark.parametrize(("truncate", "sent"), [(None, True), ("END", True), ("NONE", False)])
def test_cohere_truncates_unless_told_otherwise(truncate: str | None, sent: bool) -> None:
    triton = FakeTriton()
    assert fetch("/v2/embed", {"texts": ["x"], "truncate": truncate}, gateway(triton)).status == 200
    assert triton.requests[0]["truncate"] == [[sent]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": ["x"], "truncate": "START"}, "truncate"),
        ({"texts": ["x"], "input_type": "image"}, "input_type"),
        ({"texts": ["x"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["x"], "images": ["data:"]}, "images"),
        ({"texts": ["x"], "max_tokens": 5}, "max_tokens"),
        ({"texts": []}, "texts"),
        ({}, "texts"),
        ({"texts": ["x"], "inputs": [{"content": [{"type": "text", "text": "x"}]}]}, "texts"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs"),
        ({"texts": ["x"], "model": "ranks"}, "model"),
    ],
)
def test_cohere_refuses_unsupported_fields(body: dict[str, Any], param: str) -> None:
    refused = fetch("/v2/embed", body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.error


def test_rerank_passes_an_instruction_to_models_that_read_one(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "ranks", "query": "q", "documents": ["x"], "instruction": "Find films"}
    refused = fetch("/v1/rerank", body)
    assert (refused.status, refused.error["param"]) == (400, "instruction")
    task, inputs, outputs, parameters = MODELS["ranks"]
    reading = (*inputs, type(inputs[0])("instruction", "TYPE_STRING", optional=True))
    monkeypatch.setitem(MODELS, "ranks", (task, reading, outputs, parameters))
    triton = FakeTriton()
    assert fetch("/v1/rerank", body, gateway(triton)).status == 200
    assert triton.requests[-1]["instruction"] == [["Find films"]]

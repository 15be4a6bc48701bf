"""Embeddings by input type and precision, vectors of tokens, and every kind of ranker on the rerank routes."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from sentence_transformers.util import quantize_embeddings

from builder.runtime.fields import Field
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.quantization import PRECISIONS, RANGE, encode, quantize
from tests.serving.gateway.fake_triton import MODELS, FakeTriton
from tests.serving.gateway.requests import fetch, gateway
from tests.serving.gateway.retrieval import add_models


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1, 7, 8, 384])
def test_precisions_equal_those_of_sentence_transformers(precision: Any, size: int) -> None:
    vectors = np.random.default_rng(size).normal(size=(50, size)).astype(np.float32)
    vectors[0], vectors[1, 0] = 0, 0
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    expected = quantize_embeddings(units, precision=precision, ranges=np.tile(RANGE[:, None], size))
    assert isinstance(expected, np.ndarray)
    actual = np.stack([quantize(vector, precision) for vector in vectors])
    assert (actual.dtype, actual.tolist()) == (expected.dtype, expected.tolist())


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_precisions_keep_the_order_of_cosines(precision: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(100, 1024)).astype(np.float32)
    levels = np.stack([quantize(vector, precision) for vector in vectors]).astype(np.float32)
    whole = levels - (0 if precision == "int8" else 128)
    cosines = (vectors * whole).sum(axis=1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(whole, axis=1)
    assert cosines.min() > 0.995


def test_float16_refuses_numbers_that_it_lacks() -> None:
    with pytest.raises(ApiError, match="ends at 65504") as refused:
        encode(np.array([1, 70000], np.float32), "float16")
    assert refused.value.status == 400


@pytest.mark.parametrize("field", ["encoding_format", "embedding_type", "output_dtype"])
def test_embeddings_are_encoded_by_the_name_of_each_client(field: str) -> None:
    answer = fetch("/v1/embeddings", {"model": "embeds", "input": ["xxxx"], field: "ubinary"}).json
    assert answer["data"][0]["embedding"] == [0b11010000]
    packed = {"model": "embeds", "input": ["xxxx"], "encoding_format": "base64", "output_dtype": "int8"}  # as Voyage's
    (entry,) = fetch("/v1/embeddings", packed).json["data"]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), np.int8).tolist() == [100, 75, 0, 25]
    again = {"model": "embeds", "input": ["x"], "encoding_format": "int8", "output_dtype": "int8"}
    assert fetch("/v1/embeddings", again).error["param"] == "output_dtype"


@pytest.fixture
def prompted(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    task, inputs, outputs, parameters = MODELS["embeds"]
    names = ("prompt_name", "prompt", "chunking")
    inputs = (*inputs, *(Field(name, "TYPE_STRING", optional=True) for name in names))
    monkeypatch.setitem(MODELS, "embeds", (task, inputs, outputs, {**parameters, "prompts": '["passage", "query"]'}))
    return FakeTriton()


@pytest.mark.parametrize(
    ("body", "prompt_name"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "passage"}, "passage"),
        ({"input_type": "document"}, "passage"),
        ({"input_type": "search_document"}, "passage"),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "retrieval.passage"}, "passage"),
        ({"task": "text-matching"}, None),
        ({"prompt_name": "query"}, "query"),
        ({}, None),
    ],
)
def test_input_type_selects_the_prompt(body: dict[str, str], prompt_name: str | None, prompted: FakeTriton) -> None:
    assert fetch("/v1/embeddings", {"model": "embeds", "input": "x", **body}, gateway(prompted)).status == 200
    assert prompted.requests[0].get("prompt_name") == (None if prompt_name is None else [[prompt_name]])


def test_embedding_options_reach_the_model(prompted: FakeTriton) -> None:
    body = {"model": "embeds", "input": "x", "prompt": "", "chunking": "mean", "truncate": "NONE"}
    assert fetch("/v1/embeddings", body, gateway(prompted)).status == 200
    assert prompted.requests[0] == {
        "text_input": [["x"]],
        "prompt": [[""]],
        "chunking": [["mean"]],
        "truncate": [[False]],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_type": "image"}, "input_type"),
        ({"input_type": "query", "task": "retrieval.query"}, "task"),
        ({"input_type": "query", "prompt_name": "query"}, "input_type"),
        ({"dimensions": 2, "output_dimension": 2}, "output_dimension"),
        ({"truncate": True, "truncation": True}, "truncation"),
        ({"late_chunking": True}, "late_chunking"),
        ({"encoding_format": "int4"}, "encoding_format"),
        ({"output_dimension": 5}, "output_dimension"),
    ],
)
def test_embedding_fields_that_contradict_are_refused(body: dict[str, Any], param: str, prompted: FakeTriton) -> None:
    refused = fetch("/v1/embeddings", {"model": "embeds", "input": "x", **body}, gateway(prompted))
    assert (refused.status, refused.error["param"]) == (400, param), refused.error


LATE = {"model": "embeds", "input": ["ab", "cd", "e"], "late_chunking": True}


@pytest.fixture
def late(prompted: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    task, inputs, outputs, parameters = MODELS["embeds"]
    monkeypatch.setitem(MODELS, "embeds", (task, inputs, outputs, {**parameters, "late_chunking": "true"}))
    return prompted


def test_late_chunking_sends_all_inputs_as_one_request(late: FakeTriton) -> None:
    answer = fetch("/v1/embeddings", LATE, gateway(late))
    assert (answer.status, len(answer.json["data"])) == (200, 3)
    assert late.requests == [{"text_input": [["ab"], ["cd"], ["e"]], "chunking": [["late"]] * 3}]
    assert fetch("/v1/embeddings", {**LATE, "late_chunking": False}, gateway(late)).status == 200
    assert "chunking" not in late.requests[-1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chunking": "mean"}, "chunking"),
        ({"chunk_overlap": 3}, "chunk_overlap"),
        ({"input": ["x"] * 2000}, "late_chunking"),
    ],
)
def test_late_chunking_refuses_what_it_excludes(body: dict[str, Any], param: str, late: FakeTriton) -> None:
    refused = fetch("/v1/embeddings", {**LATE, **body}, gateway(late))
    assert (refused.status, refused.error["param"]) == (400, param), refused.error


def test_multi_vectors_have_one_vector_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = add_models(monkeypatch)
    body = {"model": "late", "input": ["ab", "abc"], "input_type": "query", "return_offsets": True}
    answer = fetch("/v1/multi-vector", body, gateway(triton)).json
    assert [len(entry["embeddings"]) for entry in answer["data"]] == [2, 3]
    assert answer["data"][1]["offsets"] == [[0, 1], [1, 2], [2, 3]]
    np.testing.assert_allclose(np.linalg.norm(answer["data"][1]["embeddings"], axis=1), 1, atol=1e-6)
    assert triton.requests[0]["input_type"] == [["query"]]
    body = {"model": "late", "input": "ab", "embedding_type": "ubinary"}
    (entry,) = fetch("/v1/multi-vector", body, gateway(triton)).json["data"]
    assert [len(vector) for vector in entry["embeddings"]] == [1, 1]
    assert "offsets" not in entry
    ((entry,), (whole,)) = (
        fetch("/v1/multi-vector", {**body, "embedding_type": name}, gateway(triton)).json["data"]
        for name in ("float16", "float")
    )
    halves = [np.frombuffer(base64.b64decode(vector), "<f2") for vector in entry["embeddings"]]
    np.testing.assert_array_equal(halves, np.float16(whole["embeddings"]))
    plain = fetch("/v1/multi-vector", {"model": "features", "input": "ab"}, gateway(triton)).json
    assert plain["data"][0]["embeddings"] == [[97, 0, 0, 1], [98, 0, 0, 1]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "embeds"}, "model"),
        ({"model": "late", "dimensions": 2}, "dimensions"),
        ({"model": "features", "return_offsets": True}, "return_offsets"),
        ({"model": "late", "prompt_name": "clustering"}, "prompt_name"),
    ],
)
def test_multi_vectors_refuse_what_a_model_lacks(
    body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = fetch("/v1/multi-vector", {"input": "a", **body}, gateway(add_models(monkeypatch)))
    assert (refused.status, refused.error["param"]) == (400, param), refused.error


@pytest.mark.parametrize("model", ["ranks", "late"])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_every_kind_of_ranker_reranks(path: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": model, "query": "q", "documents": ["ab", "xx", "xa"]}
    answer = fetch(path, body, gateway(add_models(monkeypatch))).json
    assert [(result["index"], result["relevance_score"]) for result in answer["results"]] == [(1, 1), (2, 0.5), (0, 0)]


def test_rerank_cuts_documents_at_the_limit_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: langchain-cohere sends max_tokens_per_doc with every request, and was refused."""
    triton = add_models(monkeypatch)
    body = {"model": "late", "query": "q", "documents": ["x"]}
    assert fetch("/v2/rerank", {**body, "max_tokens_per_doc": 4096}, gateway(triton)).status == 200
    assert triton.requests[-1]["truncate"] == [[True]]
    refused = fetch("/v2/rerank", {**body, "max_tokens_per_doc": 10}, gateway(triton))
    assert (refused.status, refused.error["param"]) == (400, "max_tokens_per_doc")


def test_rerank_answers_clients_of_voyage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Voyageai sends top_k, perhaps null, and truncation with every request, and reads `data`."""
    triton = add_models(monkeypatch)
    body = {"model": "ranks", "query": "q", "documents": ["ab", "xx", "xa"], "top_k": None, "truncation": True}
    answer = fetch("/v1/rerank", body, gateway(triton)).json
    assert [(one["index"], one["relevance_score"]) for one in answer["data"]] == [(1, 1), (2, 0.5), (0, 0)]
    assert (answer["object"], answer["usage"]["total_tokens"]) == ("list", answer["usage"]["prompt_tokens"])
    assert triton.requests[-1]["truncate"] == [[True]]
    answer = fetch("/v1/rerank", {**body, "top_k": 1, "return_documents": True}, gateway(triton)).json
    assert answer["data"] == [{"index": 1, "relevance_score": 1, "document": "xx"}]
    refused = fetch("/v1/rerank", {**body, "top_k": 1, "top_n": 1}, gateway(triton))
    assert (refused.status, refused.error["param"]) == (400, "top_k")


def test_tei_routes_answer_late_interaction_and_hybrid_models(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = add_models(monkeypatch)
    tokens = fetch("/embed_all", {"model": "late", "inputs": ["a", "ab"], "prompt_name": "query"}, gateway(triton)).json
    assert [len(vectors) for vectors in tokens] == [1, 2]
    assert triton.requests[0]["input_type"] == [["query"]]
    sparse = fetch("/embed_sparse", {"model": "hybrid", "inputs": ["ab", "c"]}, gateway(triton)).json
    assert sparse[1] == [{"index": 99, "value": 0.5}]
    assert fetch("/embed", {"model": "hybrid", "inputs": "ab", "normalize": False}, gateway(triton)).json == [
        [2, 3, 0, 1]
    ]


def test_hybrid_model_answers_all_outputs_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = add_models(monkeypatch)
    first, second = fetch("/models/hybrid", {"inputs": ["abc", "d"]}, gateway(triton)).json
    assert len(triton.requests) == 1
    assert (first["embedding"], second["embedding"]) == ([3, 3, 0, 1], [1, 3, 0, 1])
    assert (second["indices"], second["values"], second["offsets"]) == ([100], [0.5], [[0, 1]])
    assert (len(first["vectors"]), len(second["vectors"])) == (3, 1)


def test_extraction_task_answers_its_entities(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "extracts", "inputs": "Ada Lovelace wrote.", "parameters": {"labels": ["person"]}}
    (entity,) = fetch("/v1/tasks/entity-extraction", body, gateway(add_models(monkeypatch))).json
    assert (entity["label"], entity["text"]) == ("person", "Ada Lovelace")


def test_information_extraction_takes_and_answers_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, schema = add_models(monkeypatch), {"entities": ["person"], "structures": {"œuvre": {}}}
    rows = ["Ada Lovelace wrote.", {"text_input": "She wrote."}]
    for inputs, parameters in ((rows, {"schema": schema}), ([{"text_input": "She wrote.", "schema": schema}], {})):
        body = {"model": "fills", "inputs": inputs, "parameters": parameters}
        answers = fetch("/v1/tasks/information-extraction", body, gateway(triton)).json
        assert len(answers) == len(inputs)
        assert answers[0]["entities"][0]["text"] == "Ada Lovelace"
        assert (answers[-1]["relations"], answers[-1]["structures"]) == ([], {"work": []})
        assert [json.loads(row[0]) for row in triton.requests[-1]["schema"]] == [schema] * len(inputs)


def test_late_interaction_task_takes_texts_and_rankings(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = add_models(monkeypatch)
    ranked = {"query": "q", "documents": ["a", "x"]}
    answer = fetch("/models/late", {"inputs": ranked}, gateway(triton)).json
    assert (answer["score"], answer["order"]) == ([0, 1], [1, 0])
    assert len(fetch("/models/late", {"inputs": "abc"}, gateway(triton)).json["vectors"]) == 3

"""POST /v1/embeddings, reranking, TEI's routes and tokenization."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway


def test_embeddings_as_floats_and_as_base64() -> None:
    texts = ["x" * (1 + i) for i in range(20)]  # three requests of the model, which takes 8 rows
    floats = fetch("/v1/embeddings", {"model": "embeds", "input": texts}).json
    assert [entry["embedding"][0] for entry in floats["data"]] == [float(len(text)) for text in texts]
    assert floats["usage"]["prompt_tokens"] == sum(map(len, texts))
    packed = fetch("/v1/embeddings", {"model": "embeds", "input": texts, "encoding_format": "base64"}).json
    assert [np.frombuffer(base64.b64decode(e["embedding"]), "<f4").tolist() for e in packed["data"]] == [
        e["embedding"] for e in floats["data"]
    ]
    short = fetch("/v1/embeddings", {"model": "embeds", "input": "xxxx", "dimensions": 2}).json
    assert short["data"][0]["embedding"] == pytest.approx([0.8, 0.6])


def test_embeddings_refuse_numbers_that_json_lacks() -> None:
    refused = fetch("/v1/embeddings", {"model": "embeds", "input": ["x", "not finite"]})
    assert refused.status == 500
    assert "embedding with a number that is not finite" in refused.json["error"]["message"]


def test_error_quotes_half_a_surrogate_pair() -> None:
    refused = fetch("/v1/embeddings", {"model": "\ud800", "input": "x"})
    assert refused.status == 404
    assert "embeds" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [1, 2]}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "model": "writes"}, "model"),
        ({"input": "a", "other": 1}, "other"),
        ({"input": "\ud800"}, "text_input"),
    ],
)
def test_embeddings_refusal_names_the_field(body: dict[str, Any], param: str) -> None:
    refused = fetch("/v1/embeddings", {"model": "embeds", **body})
    assert (refused.status, refused.error["param"]) == (400, param)


def test_rerank_in_cohere_jina_and_tei_shapes() -> None:
    body = {"query": "q", "documents": ["ab", "xx", {"text": "xa"}], "top_n": 2, "return_documents": True}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = fetch(path, body).json
        assert [(r["index"], r["relevance_score"]) for r in answer["results"]] == [(1, 1.0), (2, 0.5)]
        assert answer["results"][0]["document"] == {"text": "xx"}
    tei = fetch("/rerank", {"query": "q", "texts": ["ab", "xx"], "return_text": True}).json
    assert tei == [{"index": 1, "text": "xx", "score": 1.0}, {"index": 0, "text": "ab", "score": 0.0}]
    many = fetch("/v1/rerank", {"query": "q", "documents": ["a"] * 99 + ["x"]}).json["results"]
    assert len(many) == 100
    assert many[0]["index"] == 99


def test_tei_routes_answer() -> None:
    assert fetch("/embed", {"inputs": ["xxxx", "x"], "normalize": False}).json[0][:2] == [4.0, 3.0]
    assert np.linalg.norm(fetch("/embed", {"inputs": "xxxx"}).json[0]) == pytest.approx(1)
    assert fetch("/embed", {"inputs": "xxxx", "normalize": False, "dimensions": 2}).json == [[4.0, 3.0]]
    assert fetch("/embed", {"inputs": "xxxx", "dimensions": 2}).json == [pytest.approx([0.8, 0.6])]
    for name, value in {"prompt_name": "query", "dimensions": 2, "normalize": False}.items():
        refused = fetch("/embed_all", {"inputs": "x", name: value})
        assert (refused.status, name in refused.json["error"]) == (400, True), "vectors of tokens have none of these"
    unsaid = {"prompt_name": None, "dimensions": None, "normalize": True}
    assert fetch("/embed_all", {"inputs": "ab", **unsaid}).json == [[[97, 0, 0, 1], [98, 0, 0, 1]]], "clients send them"
    expected = [{"score": 0.75, "label": "a"}, {"score": 0.25, "label": "b"}]
    assert fetch("/predict", {"inputs": "text"}).json == expected
    assert fetch("/predict", {"inputs": ["a", "pair"]}).json == expected
    assert fetch("/predict", {"inputs": [["one"], ["a", "pair"]]}).json == [expected] * 2
    info = fetch("/info").json
    assert (info["model_id"], info["max_input_length"]) == ("embeds", 64)
    refused = fetch("/embed", {"inputs": ""})
    assert refused.status == 400
    assert refused.json["error_type"] == "Validation"
    sparse = fetch("/embed_sparse", {"inputs": ["ab", "c"]}).json
    assert sparse == [[{"index": 97, "value": 0.5}, {"index": 98, "value": 0.5}], [{"index": 99, "value": 0.5}]]
    assert fetch("/embed_sparse", {"inputs": "ab", "model": "embeds"}).status == 400
    assert fetch("/embed_sparse", {"inputs": "ab", "prompt_name": "query"}).status == 400
    triton = FakeTriton()
    for truncate in (True, False):
        assert fetch("/embed_sparse", {"inputs": "ab", "truncate": truncate}, gateway(triton)).status == 200
        assert triton.requests[-1]["truncate"] == [[truncate]], "a text that must not be cut is not cut"


def test_tokenize_in_tei_and_vllm_shapes() -> None:
    begin = {"id": 1, "text": "<s>", "special": True, "start": None, "stop": None}
    letter = {"id": 97, "text": "a", "special": False, "start": 0, "stop": 1}
    assert fetch("/tokenize", {"model": "embeds", "inputs": "a"}).json == [[begin, letter]]
    bare = {"model": "guided", "inputs": ["a", "b"], "add_special_tokens": False}
    assert fetch("/tokenize", bare).json == [[letter], [{**letter, "id": 98, "text": "b"}]]
    counted = fetch("/tokenize", {"model": "embeds", "prompt": "a", "return_token_strs": True}).json
    assert counted == {"count": 2, "max_model_len": 64, "tokens": [1, 97], "token_strs": ["<s>", "a"]}
    chat = fetch("/tokenize", {"model": "guided", "messages": CHAT["messages"]}).json
    assert chat["count"] == len(chat["tokens"]) > 2
    assert fetch("/detokenize", {"model": "guided", "tokens": [1, 97]}).json == {"prompt": "<s>a"}
    assert fetch("/decode", {"model": "guided", "ids": [[1, 97], [98]]}).json == ["a", "b"]
    assert fetch("/decode", {"ids": [97]}).json == ["a"], "the only model that can"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "writes", "prompt": "a"}, "model"),
        ("/tokenize", {"model": "ranks", "prompt": "a"}, "model"),
        ("/tokenize", {"model": "embeds", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"model": "guided"}, "prompt"),
        ("/tokenize", {"model": "guided", "prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/detokenize", {"model": "embeds", "tokens": [1]}, "model"),
        ("/detokenize", {"model": "guided", "tokens": ["a"]}, "tokens"),
    ],
)
def test_tokenize_refusal_names_the_field(path: str, body: dict[str, Any], param: str) -> None:
    refused = fetch(path, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.error

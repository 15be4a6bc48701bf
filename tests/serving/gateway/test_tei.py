"""Text Embeddings Inference: the routes and fields that its clients count on, and its shape of errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.gateway.fake_triton import MODELS, FakeTriton
from tests.serving.gateway.requests import fetch, gateway

PREDICTED = [{"score": 0.75, "label": "a"}, {"score": 0.25, "label": "b"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "x"}),
        ("/embed_sparse", {"inputs": "x"}),
        ("/predict", {"inputs": "x"}),
        ("/rerank", {"query": "q", "texts": ["x"]}),
    ],
)
def test_tei_takes_its_default_truncation_direction(path: str, body: dict[str, Any]) -> None:
    """Regression: `Right`, which is the default that clients send along, was refused."""
    for direction in ("Right", "right"):
        assert fetch(path, {**body, "truncation_direction": direction}).status == 200
    refused = fetch(path, {**body, "truncation_direction": "Left"})
    assert (refused.status, "truncation_direction" in refused.json["error"]) == (400, True)


def test_tei_accepts_the_truncation_side_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    task, inputs, outputs, parameters = MODELS["embeds"]
    monkeypatch.setitem(MODELS, "embeds", (task, inputs, outputs, {**parameters, "truncation_side": "left"}))
    assert fetch("/embed", {"inputs": "x", "truncation_direction": "Left"}).status == 200
    assert fetch("/embed", {"inputs": "x", "truncation_direction": "Right"}).status == 400


def test_tei_answers_raw_scores() -> None:
    """Regression: `raw_scores` was refused, of classifiers and rerankers."""
    triton = FakeTriton()
    raw = fetch("/predict", {"inputs": "x", "raw_scores": True}, gateway(triton)).json
    assert raw == [{"score": 1.5, "label": "a"}, {"score": -0.5, "label": "b"}]
    ranked = fetch("/rerank", {"query": "q", "texts": ["ab", "xx"], "raw_scores": True}, gateway(triton)).json
    assert ranked == [{"index": 1, "score": 9.0}, {"index": 0, "score": 0.0}]
    assert [request["function_to_apply"] for request in triton.requests] == [[["none"]], [["none"]]]


def test_raw_scores_of_a_model_without_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task, inputs, outputs, parameters = MODELS["ranks"]
    older = tuple(field for field in inputs if field.name != "function_to_apply")
    monkeypatch.setitem(MODELS, "ranks", (task, older, outputs, parameters))
    refused = fetch("/rerank", {"query": "q", "texts": ["x"], "raw_scores": True})
    assert (refused.status, "raw_scores" in refused.json["error"]) == (400, True)


def test_tei_default_route_uses_the_named_model() -> None:
    """Regression: `POST /`, which TEI's own examples use, was missing."""
    assert fetch("/", {"model": "embeds", "inputs": "xxxx", "normalize": False}).json[0][:2] == [4.0, 3.0]
    assert fetch("/", {"model": "topics", "inputs": ["a", "pair"]}).json == PREDICTED
    assert fetch("/", {"model": "sparse", "inputs": "c"}).json == [[{"index": 99, "value": 0.5}]]
    assert fetch("/", {"model": "ranks", "query": "q", "texts": ["x"]}).json == [{"index": 0, "score": 1.0}]


def test_tei_default_route_selects_by_the_body() -> None:
    assert fetch("/", {"query": "q", "texts": ["x"]}).json == [{"index": 0, "score": 1.0}]
    alike = fetch("/", {"inputs": {"source_sentence": "xx", "sentences": ["xx"]}}).json
    assert alike == [pytest.approx(1)]
    unclear = fetch("/", {"inputs": "x"})
    assert unclear.status == 400
    assert "embeds, ranks, sparse, topics" in unclear.json["error"]
    assert fetch("/", {"model": "writes", "inputs": "x"}).json["error_type"] == "Validation"


def test_tei_default_route_needs_a_key_and_the_page_does_not() -> None:
    app = gateway(keys=(("mine", "secret"),))
    assert fetch("/", app=app).status == 200
    assert fetch("/", {"model": "embeds", "inputs": "x"}, app).status == 401
    headers = {"authorization": "Bearer secret"}
    assert fetch("/", {"model": "embeds", "inputs": "x"}, app, headers=headers).status == 200


def test_tei_similarity_is_the_cosine_of_the_vectors() -> None:
    inputs = {"source_sentence": "xxxx", "sentences": ["xxxx", "x"]}
    parameters = {"truncate": True, "truncation_direction": "Right"}
    same, other = fetch("/similarity", {"inputs": inputs, "parameters": parameters}).json
    assert same == pytest.approx(1)
    assert other == pytest.approx((4 * 1 + 3 * 3 + 1) / (26 * 11) ** 0.5)
    assert fetch("/similarity", {"inputs": {"source_sentence": "x", "sentences": []}}).status == 400


def test_embeddings_default_to_the_only_embedder() -> None:
    """TEI's names of OpenAI's route: it serves one model."""
    for path in ("/embeddings", "/v1/embeddings"):
        answer = fetch(path, {"input": "xxxx"}).json
        assert (answer["model"], answer["data"][0]["embedding"][:2]) == ("embeds", [4.0, 3.0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "q", "texts": ["x"], "other": 1}),
        ("/rerank", {"model": "embeds", "query": "q", "texts": ["x"]}),
        ("/tokenize", {"model": "ranks", "inputs": "x"}),
        ("/tokenize", {"inputs": 5}),
        ("/tokenize", {"model": "writes", "inputs": "a"}),
        ("/tokenize", {"model": "embeds", "inputs": "a", "prompt_name": "query"}),
        ("/similarity", {"inputs": "x"}),
        ("/", {"texts": ["x"]}),
    ],
)
def test_tei_clients_get_errors_in_its_shape(path: str, body: dict[str, Any]) -> None:
    """Regression: errors of /rerank and /tokenize had OpenAI's shape for every client."""
    refused = fetch(path, body)
    assert refused.status == 400
    assert set(refused.json) == {"error", "error_type"}
    assert refused.json["error_type"] == "Validation"


def test_shared_routes_answer_other_clients_with_openai_errors() -> None:
    assert fetch("/rerank", {"query": "q", "documents": []}).error["param"] == "documents"
    assert fetch("/tokenize", {"model": "guided"}).error["param"] == "prompt"

"""Every task by its own inputs, in the shape of Hugging Face's pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import fetch, gateway

LABELS = [{"label": "a", "score": 0.75}, {"label": "b", "score": 0.25}]


def test_task_classification_has_the_pipeline_shape() -> None:
    """Regression: what huggingface_hub read was inside an object of the gateway's own."""
    path = "/v1/tasks/text-classification"
    assert fetch(path, {"inputs": "a"}).json == [LABELS]
    assert fetch(path, {"inputs": [{"text_input": "a", "text_pair": "b"}, "c"]}).json == [LABELS, LABELS]
    triton = FakeTriton()
    fetch(path, {"inputs": "a", "parameters": {"top_k": 2, "function_to_apply": "none"}}, gateway(triton))
    assert (triton.requests[0]["top_k"], triton.requests[0]["function_to_apply"]) == ([[2]], [["none"]])


def test_task_text_generation_has_the_pipeline_shape() -> None:
    triton = FakeTriton()
    parameters = {"max_new_tokens": 2, "stop": ["x"], "seed": 5, "return_full_text": False, "generate_parameters": None}
    body = {"model": "writes", "inputs": ["a"], "parameters": parameters}
    answer = fetch("/v1/tasks/text-generation", body, gateway(triton)).json
    assert answer == [{"generated_text": "0 1 ", "finish_reason": "length"}]
    (request,) = triton.requests
    assert (request["max_tokens"], request["stop_words"], request["random_seed"]) == ([2], ["x"], [5])
    nested = {"generate_parameters": {"max_new_tokens": 3}}
    whole = fetch("/v1/tasks/text-generation", {"model": "writes", "inputs": "a", "parameters": nested}).json
    assert whole[0]["generated_text"] == "0 1 2 "


def test_task_feature_extraction_and_similarity_share_vectors() -> None:
    path = "/v1/tasks/feature-extraction"
    assert fetch(path, {"model": "embeds", "inputs": "xxxx"}).json == [4, 3, 0, 1]
    assert fetch(path, {"model": "embeds", "inputs": ["xxxx"], "normalize": False}).json == [[4, 3, 0, 1]]
    beside = {"model": "embeds", "inputs": "xxxx", "normalize": True, "dimensions": 2, "truncation_direction": "right"}
    assert fetch(path, beside).json == pytest.approx([0.8, 0.6])
    assert fetch("/v1/tasks/sentence-similarity", {"inputs": "xxxx"}).json == [4, 3, 0, 1]
    assert fetch(path, {"model": "features", "inputs": ["ab", "c"]}).json == [
        [[97, 0, 0, 1], [98, 0, 0, 1]],
        [[99, 0, 0, 1]],
    ]


def test_task_sentence_similarity_compares_with_the_source() -> None:
    inputs = {"source_sentence": "xx", "sentences": ["xx", "xxxx"]}
    same, other = fetch("/v1/tasks/sentence-similarity", {"inputs": inputs, "parameters": {"truncate": True}}).json
    assert same == pytest.approx(1)
    assert other < 1


def test_models_route_names_the_model_in_its_path() -> None:
    """The only place that huggingface_hub has for it, beside a URL."""
    assert fetch("/models/topics", {"inputs": "a"}).json == [LABELS]
    assert fetch("/models/topics", {"inputs": "a", "model": "topics"}).json == [LABELS]
    assert fetch("/models/topics", {"inputs": "a", "model": "embeds"}).error["param"] == "model"
    assert fetch("/models/other", {"inputs": "a"}).status == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tasks/translation", {"inputs": "a"}, "model"),
        ("/v1/tasks/text-classification", {"inputs": "a", "parameters": {"other": 1}}, "other"),
        ("/v1/tasks/text-classification", {"inputs": "a", "other": 1}, "other"),
        ("/v1/tasks/text-ranking", {"inputs": "a"}, "inputs"),
        ("/v1/tasks/text-classification", {"inputs": []}, "inputs"),
        ("/models/features", {"inputs": "a", "normalize": True}, "normalize"),
        ("/models/embeds", {"inputs": "a", "truncation_direction": "left"}, "truncation_direction"),
        ("/models/embeds", {"inputs": "a", "encoding_format": "base64"}, "encoding_format"),
        ("/models/embeds", {"inputs": {"source_sentence": "a", "sentences": []}}, "sentences"),
        ("/models/writes", {"inputs": "a", "stream": True}, "stream"),
        ("/models/writes", {"inputs": "a", "parameters": {"details": True}}, "details"),
        ("/models/writes", {"inputs": "a", "parameters": {"generate_parameters": 5}}, "generate_parameters"),
    ],
)
def test_task_refusal_names_the_field(path: str, body: dict[str, Any], param: str) -> None:
    refused = fetch(path, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.error

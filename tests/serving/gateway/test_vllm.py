"""vLLM's routes of models that do not generate: pairs of texts, labels, and pooling."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import fetch, gateway


def _scores(path: str, body: dict[str, Any]) -> list[float]:
    answer = fetch(path, body).json
    assert answer["object"] == "list"
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (i, "score") for i in range(len(answer["data"]))
    ]
    return [one["score"] for one in answer["data"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second"), [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_score_accepts_every_pair_of_names(path: str, first: str, second: str) -> None:
    one = {"model": "ranks", first: "q", second: ["xx", "ab", "xa"]}
    assert _scores(path, one) == [1, 0, 0.5]
    each = {"model": "ranks", first: ["q", "r"], second: ["ab", "xx"]}
    assert _scores(path, each) == [0, 1]
    assert _scores(path, {"model": "ranks", first: "q", second: "xx"}) == [1]


def test_score_truncation_and_usage() -> None:
    triton = FakeTriton()
    body = {"model": "ranks", "text_1": "q", "text_2": "xx", "truncate_prompt_tokens": -1, "use_activation": False}
    answer = fetch("/score", body, gateway(triton)).json
    assert answer["data"][0]["score"] == 9
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    assert (triton.requests[0]["truncate"], triton.requests[0]["function_to_apply"]) == ([[True]], [["none"]])


def test_score_of_an_embedder_is_the_cosine() -> None:
    same, other = _scores("/score", {"model": "embeds", "text_1": "xxxx", "text_2": ["xxxx", "x"]})
    assert same == pytest.approx(1)
    assert other == pytest.approx(14 / (26 * 11) ** 0.5)


def test_classify_probabilities_keep_the_label_order() -> None:
    answer = fetch("/classify", {"model": "topics", "input": ["x", "y"]}).json
    expected = {"label": "a", "probs": [0.75, 0.25], "num_classes": 2}
    assert answer["data"] == [{"index": 0, **expected}, {"index": 1, **expected}]
    raw = fetch("/classify", {"input": "x", "use_activation": False}).json
    assert raw["data"][0]["probs"] == [1.5, -0.5]


def test_pooling_answers_vectors_or_probabilities() -> None:
    def data(body: dict[str, Any]) -> Any:
        return fetch("/pooling", body).json["data"][0]["data"]

    assert data({"model": "embeds", "input": "xxxx"}) == [4, 3, 0, 1]
    assert data({"model": "embeds", "input": "xxxx", "task": "embed", "dimensions": 2}) == pytest.approx([0.8, 0.6])
    assert data({"model": "features", "input": ["ab"]}) == [[97, 0, 0, 1], [98, 0, 0, 1]]
    assert data({"model": "topics", "input": "x", "task": "classify"}) == [0.75, 0.25]
    packed = base64.b64decode(data({"model": "features", "input": "ab", "encoding_format": "base64"}))
    np.testing.assert_array_equal(np.frombuffer(packed, "<f4").reshape(2, 4)[:, 0], [97, 98])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"model": "ranks", "text_1": "q"}, "text_1"),
        ("/score", {"model": "ranks"}, "text_1"),
        ("/score", {"model": "ranks", "text_1": "q", "documents": "x"}, "text_1"),
        ("/score", {"model": "ranks", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (
            "/score",
            {"model": "ranks", "text_1": "q", "text_2": "x", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
        ),
        ("/score", {"model": "ranks", "text_1": "q", "text_2": "x", "truncation_side": "left"}, "truncation_side"),
        ("/score", {"model": "embeds", "text_1": "q", "text_2": "x", "use_activation": True}, "use_activation"),
        ("/score", {"model": "topics", "text_1": "q", "text_2": "x"}, "model"),
        ("/score", {"text_1": "q", "text_2": "x"}, "model"),
        ("/classify", {"model": "embeds", "input": "x"}, "model"),
        ("/classify", {"model": "topics", "input": [[1, 2]]}, "input"),
        ("/classify", {"model": "topics", "messages": []}, "input"),
        ("/classify", {"model": "topics", "input": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/pooling", {"model": "ranks", "input": "x"}, "model"),
        ("/pooling", {"model": "writes", "input": "x"}, "model"),
        ("/pooling", {"model": "embeds", "input": "x", "task": "token_embed"}, "task"),
        ("/pooling", {"model": "features", "input": "x", "dimensions": 2}, "dimensions"),
        ("/pooling", {"model": "embeds", "input": "x", "normalize": True}, "normalize"),
    ],
)
def test_pooling_refusal_names_the_field(path: str, body: dict[str, Any], param: str) -> None:
    refused = fetch(path, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.error

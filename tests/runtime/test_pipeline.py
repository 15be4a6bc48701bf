"""The emitted pipeline in process: isolation of requests, order, truncation, failing engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from builder.runtime.contract import FILE, RequestLimits, dump
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import InputError
from builder.runtime.panics import TokenizerError
from tests.servings import answered, encoder_serving
from tests.tiny_encoders import make_tokenizer

LIMIT = 12


class SumEngine:
    """Fake engine: the feature of a row is the sum of its tokens, which reveals wrong padding and order."""

    def __init__(self, fail_on: int | None = None) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.fail_on = fail_on

    def __call__(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        self.shapes.append(feeds["input_ids"].shape)
        if self.fail_on is not None and (feeds["input_ids"] == self.fail_on).any():
            raise RuntimeError("engine failed")
        total = (feeds["input_ids"] * feeds["attention_mask"]).sum(axis=1, keepdims=True)
        return {"features": np.repeat(total, 2, axis=1).astype(np.float32)}


@pytest.fixture
def front(tmp_path: Path) -> Callable[..., Pipeline]:
    tokenizer = make_tokenizer("wordpiece", type_ids=True)

    def make(engine: SumEngine, **changes: Any) -> Pipeline:
        serving = encoder_serving(max_length=LIMIT, **changes)
        (tmp_path / FILE).write_text(dump(serving))
        (tmp_path / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str())
        return Pipeline(tmp_path, engine)

    return make


def _request(*texts: str, **options: Any) -> dict[str, np.ndarray]:
    tensors = {"text_input": np.array([[text.encode()] for text in texts], dtype=object)}
    return {**tensors, **{name: np.array([[value]] * len(texts)) for name, value in options.items()}}


def _sum(pipeline: Pipeline, text: str) -> float:
    return float(sum(pipeline.text([text])[0].ids))


def test_adapter_of_a_model_without_them_is_refused(front: Callable[..., Pipeline]) -> None:
    """Regression: the model's own answer came under the name of the adapter."""
    refused, known = front(SumEngine())([_request("a", lora_name=b"sql"), _request("a", lora_name=b"")])
    assert isinstance(refused, InputError)
    assert "lora_name is 'sql', and this model takes no adapters" in str(refused)
    assert isinstance(known, dict)


def test_pipeline_counts_the_tokens_of_each_answer(front: Callable[..., Pipeline]) -> None:
    pipeline = front(SumEngine())
    texts = ("a", "the museum opens late")
    (answer,) = pipeline([_request(*texts)])
    assert answered(answer)["prompt_tokens"].tolist() == [[len(encoding)] for encoding in pipeline.text(list(texts))]


def test_pipeline_answers_in_the_order_of_requests(front: Callable[..., Pipeline]) -> None:
    engine = SumEngine()
    pipeline = front(engine)
    texts = ["the train to the coast", "a", "the museum is closed", "wheat", "a fox", "he forgot the box"] * 3
    answers = pipeline([_request(text) for text in texts])
    assert [answered(a)["embedding"][0, 0] for a in answers] == [_sum(pipeline, t) for t in texts]
    assert 1 < len(engine.shapes) < len(texts), "rows of similar length share calls"
    assert pipeline.counts.calls == len(engine.shapes)
    assert pipeline.counts.padded_tokens == sum(rows * length for rows, length in engine.shapes)


def test_pipeline_pads_calls_to_buckets_without_changing_answers(front: Callable[..., Pipeline]) -> None:
    engine = SumEngine()
    buckets = [[1, 8], [4, 8], [8, 8], [4, 16]]
    batching = {"token_budget": 64, "max_rows": 8, "call_cost": 4, "buckets": buckets}
    pipeline = front(engine, batching=batching)
    texts = ["the train to the coast", "a", "the museum is closed", "wheat", "a fox", "he forgot the box"]
    answers = pipeline([_request(text) for text in texts])
    assert [answered(a)["embedding"][0, 0] for a in answers] == [_sum(pipeline, t) for t in texts]
    assert set(engine.shapes) <= set(map(tuple, buckets))
    assert pipeline.counts.padded_tokens == sum(rows * length for rows, length in engine.shapes)


def test_pipeline_warms_up_every_length_of_several_rows(front: Callable[..., Pipeline]) -> None:
    engine = SumEngine()
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}
    batching = {"token_budget": 64, "max_rows": 8, "call_cost": 4, "buckets": [[1, 8], [1, 12], [4, 8], [2, 16]]}
    pipeline = front(engine, batching=batching, warm_up=[row])
    pipeline.warm_up()
    assert engine.shapes == [(1, 3), (1, 8), (1, 16)]


def test_pipeline_feeds_need_no_engine_call(front: Callable[..., Pipeline]) -> None:
    """Builds calibrate and prune on these feeds."""
    engine = SumEngine()
    pipeline = front(engine)
    requests = [_request("the train to the coast", "a"), {"text_input": np.array([[b"\xff"]], dtype=object)}]
    feeds, answers = pipeline.feeds(requests)
    assert engine.shapes == []
    assert [type(answers[index]) for index in answers] == [InputError]
    assert list(answers) == [1]
    pipeline(requests)
    assert [call["input_ids"].shape for call in feeds] == engine.shapes


def test_pipeline_fails_only_the_invalid_request(front: Callable[..., Pipeline]) -> None:
    pipeline = front(SumEngine())
    bad = {"text_input": np.array([[b"\xff"]], dtype=object)}
    answers = pipeline([_request("a fox"), bad, _request("word " * 50), _request("the box")])
    assert isinstance(answers[1], InputError)
    assert isinstance(answers[2], InputError)
    assert "the limit of this model is 12" in str(answers[2])
    assert [float(answered(answers[i])["embedding"][0, 0]) for i in (0, 3)] == [
        _sum(pipeline, "a fox"),
        _sum(pipeline, "the box"),
    ]


def test_pipeline_fails_only_the_requests_of_a_failed_call(front: Callable[..., Pipeline]) -> None:
    pipeline = front(SumEngine())
    poison = pipeline.text.tokenizer.token_to_id("the")
    pipeline.infer = SumEngine(fail_on=poison)
    answers = pipeline([_request("the " * 8), _request("a")])
    assert isinstance(answers[0], RuntimeError)
    assert isinstance(answers[1], dict)


def test_pipeline_truncates_on_request_and_reports_it(front: Callable[..., Pipeline]) -> None:
    pipeline = front(SumEngine())
    (cut,) = pipeline([_request("the " * 50, truncate=True)])
    (whole,) = pipeline([_request("the", truncate=True)])
    assert isinstance(cut, dict)
    assert isinstance(whole, dict)
    assert cut["truncated"].tolist() == [[True]]
    assert whole["truncated"].tolist() == [[False]]
    the = pipeline.text.tokenizer.token_to_id("the")
    assert the is not None
    assert cut["embedding"][0, 0] == the * (LIMIT - 2) + _sum(pipeline, "the") - the


def test_pipeline_reports_truncation_per_row(front: Callable[..., Pipeline]) -> None:
    (answer,) = front(SumEngine(), truncate=True)([_request("a", "the " * 50, "b")])
    assert isinstance(answer, dict)
    assert answer["truncated"].tolist() == [[False], [True], [False]]


def test_pipeline_answers_every_request_of_a_batch(front: Callable[..., Pipeline]) -> None:
    pipeline = front(SumEngine())
    for size in (0, 1, 7, 40):
        answers = pipeline([_request("a " * (1 + i % 9)) for i in range(size)])
        assert len(answers) == size
        assert all(isinstance(answer, dict) for answer in answers)


def test_pipeline_refuses_only_the_request_that_is_too_large(front: Callable[..., Pipeline]) -> None:
    engine = SumEngine()
    pipeline = front(engine, limits=RequestLimits(request_bytes=1000, request_tokens=30))
    answers = pipeline([_request("the fox " * 300, truncate=True), _request(*["the fox"] * 10), _request("a fox")])
    assert isinstance(answers[0], InputError)
    assert "the request has 2400 bytes of text; this model takes at most 1000" in str(answers[0])
    assert isinstance(answers[1], InputError)
    assert "in 10 rows; this model takes at most 30 at once" in str(answers[1])
    assert isinstance(answers[2], dict)
    assert [shape[0] for shape in engine.shapes] == [1], "the engine sees the row of the last alone"


def test_pipeline_fails_only_the_request_of_a_tokeniser_panic(front: Callable[..., Pipeline]) -> None:
    """If a regular expression fails on a text, the library panics, which is not an `Exception`."""
    pipeline = front(SumEngine())
    pipeline.text.tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+)+$"), "isolated")
    answers = pipeline([_request("a"), _request("x" * 50 + "y"), _request("the")])
    assert isinstance(answers[1], TokenizerError)
    assert "the model's tokenizer fails here: Onig: Regex search error: retry-limit" in str(answers[1])
    assert isinstance(answers[0], dict)
    assert isinstance(answers[2], dict)

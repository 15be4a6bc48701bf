"""huggingface_hub's InferenceClient against the gateway's process over a real Triton, for every shared task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient, constants

from builder.common.samples import TEXTS
from builder.serving.client.client import Client
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports

Connect = Callable[[str], Client]
Asking = Callable[[str], InferenceClient]


@pytest.fixture(scope="module")
def url(server: TritonServer) -> Iterator[str]:
    port = free_ports().http
    with gateway(server.url, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def asking(url: str, monkeypatch: pytest.MonkeyPatch) -> Asking:
    """Return a function that connects a client to a path of the gateway, without access to the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return lambda path: InferenceClient(model=f"{url}{path}", token="none", timeout=300)


def test_client_reads_labels(asking: Asking, client: Connect) -> None:
    labels = asking("/models/topics").text_classification(TEXTS[0])
    expected = client("topics").ask({"text_input": TEXTS[0], "top_k": 3})
    assert [one.label for one in labels] == expected["label"]
    assert [one.score for one in labels] == pytest.approx(expected["score"], abs=1e-5)
    (first,) = asking("/models/topics").text_classification(TEXTS[0], top_k=1, function_to_apply="none")
    assert first.label == labels[0].label


def test_client_reads_zero_shot_labels(asking: Asking) -> None:
    path = "/v1/tasks/zero-shot-classification"
    labels = asking(path).zero_shot_classification(TEXTS[0], ["sport", "food"], hypothesis_template="It is {}.")
    assert {one.label for one in labels} == {"sport", "food"}
    assert sum(one.score for one in labels) == pytest.approx(1, abs=1e-5)


def test_client_reads_entities(asking: Asking) -> None:
    found = asking("/models/names").token_classification(
        TEXTS[0], aggregation_strategy="simple", ignore_labels=["none"]
    )
    assert found
    assert all(TEXTS[0][one.start : one.end] and one.entity_group for one in found)


def test_client_reads_question_answers(asking: Asking) -> None:
    path, context = "/v1/tasks/question-answering", "Ada lives in London"
    best: Any = asking(path).question_answering("Who?", context)
    assert context[best.start : best.end] == best.answer
    several: Any = asking(path).question_answering("Who?", context, top_k=2)
    assert [several[0].answer, len(several)] == [best.answer, 2]


def test_client_reads_mask_predictions(asking: Asking) -> None:
    predictions = asking("/v1/tasks/fill-mask").fill_mask("The [MASK] opens.", top_k=3)
    scores = [one.score for one in predictions]
    assert scores == sorted(scores, reverse=True)
    assert len({one.token for one in predictions}) == 3


def test_client_reads_embeddings(asking: Asking, client: Connect) -> None:
    api = asking("/models/minilm_fp32")
    expected = np.array(client("minilm_fp32").ask({"text_input": TEXTS[0]})["embedding"])
    vector = api.feature_extraction(TEXTS[0], normalize=True, truncate=True, truncation_direction="right")
    np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
    assert api.feature_extraction([TEXTS[0], TEXTS[1]]).shape == (2, 384)
    assert asking("/models/features").feature_extraction(TEXTS[0]).ndim == 2


def test_client_compares_sentences(asking: Asking) -> None:
    same, other = asking("/models/minilm_fp32").sentence_similarity(TEXTS[0], other_sentences=[TEXTS[0], TEXTS[1]])
    assert same == pytest.approx(1, abs=1e-5)
    assert other < 0.9


def test_client_reads_summaries_and_translations(asking: Asking, client: Connect) -> None:
    summary = asking("/v1/tasks/summarization").summarization(TEXTS[0], generate_parameters={"max_new_tokens": 8})
    expected = client("sums").ask({"text_input": TEXTS[0], "max_tokens": 8})
    assert summary.summary_text == "".join(expected["text_output"])
    translated = asking("/v1/tasks/translation").translation("The film", src_lang="en_XX", tgt_lang="ro_RO")
    expected = client("speaks").ask({"text_input": "The film", "target_language": "ro_RO"})
    assert translated.translation_text == "".join(expected["text_output"])


def test_client_reads_generated_text(asking: Asking, client: Connect) -> None:
    text = asking("/models/writes").text_generation("The film", max_new_tokens=6, temperature=0.0, stop=["never"])
    expected = client("writes").ask({"text_input": "The film", "max_tokens": 6, "temperature": 0.0})
    assert text == "".join(expected["text_output"])


def test_rerank_raw_scores_are_logits(url: str, client: Connect) -> None:
    body = {"query": "passport", "texts": list(TEXTS[:3]), "model": "ranks"}
    scores = {one["index"]: one["score"] for one in httpx.post(f"{url}/rerank", json=body).json()}
    raw = httpx.post(f"{url}/rerank", json={**body, "raw_scores": True}).json()
    assert len(raw) == 3
    for one in raw:
        assert 1 / (1 + math.exp(-one["score"])) == pytest.approx(scores[one["index"]], abs=1e-5)
    with pytest.raises(Exception, match="function_to_apply is 'softmax'; expected one of sigmoid, none"):
        client("ranks").ask({"query": "a", "documents": ["b"], "function_to_apply": "softmax"})

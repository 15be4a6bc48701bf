"""Answers of a real Triton against transformers, for every task, with its options, on real text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import difference
from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.serving.client.client import Client
from tests.models import SERVED, minilm

UNICODE = "Zürich – 東京 and the naïve 🚆 café."
QUESTION = "What was loud?"
SCHEMA = {
    "entities": {"person": "a name", "company": {"threshold": 0.3}},
    "classifications": [{"task": "topic", "labels": ["money", "music"]}],
    "relations": ["founded"],
    "structures": {"sale": {"fields": [{"name": "year", "dtype": "str"}, {"name": "kind", "choices": ["a", "b"]}]}},
}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "topics": [
        {"text_input": TEXTS[0]},
        {"text_input": UNICODE, "top_k": 3},
        {"text_input": TEXTS[1], "text_pair": TEXTS[9], "top_k": 2},
        {"text_input": TEXTS[2], "top_k": 3, "function_to_apply": "sigmoid"},
        {"text_input": TEXTS[2], "top_k": 3, "function_to_apply": "none"},
    ],
    "flags": [{"text_input": TEXTS[4], "top_k": 3}, {"text_input": UNICODE}],
    "entail": [
        {"text_input": TEXTS[6], "candidate_labels": ["sport", "music", "phones"]},
        {"text_input": TEXTS[6], "candidate_labels": ["sport", "music"], "multi_label": True},
        {"text_input": TEXTS[7], "candidate_labels": ["health"]},
        {"text_input": UNICODE, "candidate_labels": ["a", "ü"], "hypothesis_template": "It is about {} here."},
    ],
    "names": [
        {"text_input": text, "aggregation_strategy": strategy}
        for strategy in ("none", "simple", "first", "average", "max")
        for text in (TEXTS[11], UNICODE)
    ]
    + [{"text_input": TEXTS[11], "ignore_labels": ["B-PER", "I-LOC"]}],
    "names_bpe": [{"text_input": text, "aggregation_strategy": "simple"} for text in (TEXTS[11], UNICODE)],
    "private": [
        {"text_input": text, "aggregation_strategy": strategy}
        for strategy in ("none", "simple", "viterbi")
        for text in (TEXTS[11], UNICODE)
    ],
    "answers": [{"question": QUESTION, "context": TEXTS[0]}, {"question": QUESTION, "context": UNICODE}],
    "masks": [
        {"text_input": "The [MASK] to the coast."},
        {"text_input": "The [MASK] to the [MASK].", "top_k": 2},
        {"text_input": "The [MASK] ü 東.", "targets": ["▁the", "a"], "top_k": 2},
    ],
    "ranks": [{"query": TEXTS[0], "documents": list(TEXTS[1:6])}, {"query": UNICODE, "documents": [TEXTS[3]]}],
    "features": [{"text_input": TEXTS[5]}, {"text_input": UNICODE}],
    "extracts": [
        {"text_input": TEXTS[11], "labels": ["person", "place"]},
        {"text_input": UNICODE, "labels": ["ville"], "threshold": 0.2},
        {"text_input": TEXTS[17], "labels": ["person", "company", "place"], "flat_ner": False},
        {"text_input": TEXTS[17], "labels": ["person", "company"], "multi_label": True},
    ],
    "fills": [
        {"text_input": TEXTS[11], "labels": ["person", "place"]},
        {"text_input": UNICODE, "labels": ["ville"], "threshold": 0.2},
        {"text_input": TEXTS[17], "schema": json.dumps(SCHEMA)},
    ],
    "late": [
        {"text_input": UNICODE},
        {"text_input": TEXTS[5], "input_type": "query"},
        {"query": TEXTS[0], "documents": list(TEXTS[1:12])},
    ],
    "pooled": [{"text_input": TEXTS[26]}, {"text_input": UNICODE}],
    "embeds": [
        {"text_input": TEXTS[3]},
        {"text_input": TEXTS[3], "prompt_name": "query"},
        {"text_input": UNICODE, "prompt_name": "query"},
    ],
    "judges": [{"query": TEXTS[0], "documents": list(TEXTS[1:6])}],
    "hybrid": [{"text_input": TEXTS[3]}, {"text_input": UNICODE}],
    "searches": [
        {"text_input": text, "input_type": kind} for text in (TEXTS[3], UNICODE) for kind in ("query", "document")
    ],
    "table": [
        {"text_input": TEXTS[26]},
        {"text_input": UNICODE, "prompt_name": "query"},
        {"text_input": TEXTS[5], "dimensions": 24},
        {"text_input": "\u200b"},
    ],
    "minilm_fp32": [{"text_input": text} for text in (*TEXTS[20:26], UNICODE)],
}


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    loaded: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in loaded:
            model = SERVED.get(name)
            spec = (
                make_spec(model=str(checkpoint(name)), task=model.task, **model.spec)
                if model
                else make_spec(model=str(minilm()))
            )
            loaded[name] = resolve(spec)
        return loaded[name]

    return get


@pytest.mark.parametrize(
    ("name", "request_index"), [(name, i) for name, requests in REQUESTS.items() for i in range(len(requests))]
)
def test_served_answer_equals_transformers(
    name: str, request_index: int, client: Callable[[str], Client], reference: Callable[[str], Any]
) -> None:
    sample = REQUESTS[name][request_index]
    checkpoint = reference(name)
    expected = checkpoint.task.reference(checkpoint, sample)
    answer = client(name).ask(sample)
    error, where = difference(expected, answer)
    assert error < 1e-4, where
    assert answer["truncated"] is False


def test_requests_cover_every_served_model() -> None:
    assert set(REQUESTS) == {*SERVED, "minilm_fp32"}


def test_embeddings_equal_sentence_transformers(client: Callable[[str], Client]) -> None:
    expected = SentenceTransformer(str(minilm()), device="cpu").encode(list(TEXTS[:12]))
    served = client("minilm_fp32")
    answers = served.ask_tensors({"text_input": np.array([[t.encode()] for t in TEXTS[:12]], dtype=object)})
    np.testing.assert_allclose([a["embedding"] for a in answers], expected, atol=1e-5)


@pytest.mark.parametrize("prompt", [None, "query"])
def test_decoder_embeddings_equal_sentence_transformers(
    prompt: str | None, client: Callable[[str], Client], checkpoint: Callable[[str], Path]
) -> None:
    """Rows of one request are padded, and the last token of each is its embedding."""
    texts = [*TEXTS[:8], UNICODE, "a"]
    expected = SentenceTransformer(str(checkpoint("embeds")), device="cpu").encode(texts, prompt_name=prompt)
    tensors = {"text_input": np.array([[text.encode()] for text in texts], dtype=object)}
    if prompt is not None:
        tensors["prompt_name"] = np.array([[prompt.encode()]] * len(texts), dtype=object)
    answers = client("embeds").ask_tensors(tensors)
    np.testing.assert_allclose([answer["embedding"] for answer in answers], expected, atol=1e-5)


@pytest.mark.parametrize(("name", "least"), [("minilm_int8", 0.99), ("minilm_openvino", 0.995)])
def test_int8_embeddings_stay_close_to_fp32(name: str, least: float, client: Callable[[str], Client]) -> None:
    vectors = [
        np.array([client(served).ask({"text_input": text})["embedding"] for text in TEXTS])
        for served in ("minilm_fp32", name)
    ]
    cosines = (vectors[0] * vectors[1]).sum(axis=1)
    assert least <= cosines.mean() < 0.99999, "close to fp32, and not fp32"


def test_openvino_answers_do_not_depend_on_the_batch(client: Callable[[str], Client]) -> None:
    served = client("minilm_openvino")
    alone = [served.ask({"text_input": text})["embedding"] for text in TEXTS[:12]]
    together = served.ask_tensors({"text_input": np.array([[t.encode()] for t in TEXTS[:12]], dtype=object)})
    np.testing.assert_allclose([answer["embedding"] for answer in together], alone, atol=2e-3)

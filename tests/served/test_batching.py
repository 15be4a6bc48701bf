"""Batching on a real Triton: requests share executions, and answers do not change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from builder.checkpoints.distances import difference
from builder.common.errors import ServeError
from builder.common.samples import TEXTS
from builder.serving.client.client import Client
from tests.served.statistics import TRIES, counted, settled


def _rows(texts: list[str]) -> dict[str, np.ndarray]:
    return {"text_input": np.array([[text.encode()] for text in texts], dtype=object)}


@pytest.mark.parametrize("name", ["minilm_fp32", "topics", "pooled", "names"])
def test_answers_do_not_depend_on_batch_or_order(name: str, client: Callable[[str], Client]) -> None:
    served = client(name)
    texts = [*TEXTS[:26:3], "a"]
    alone = [served.ask({"text_input": text}) for text in texts]
    together = served.ask_tensors(_rows(texts))
    backwards = served.ask_tensors(_rows(texts[::-1]))[::-1]
    for batch in (together, backwards):
        error, where = difference(alone, batch)
        assert error < 1e-5, where


def test_int8_answers_depend_on_their_batch_only_slightly(client: Callable[[str], Client]) -> None:
    served = client("minilm_int8")
    alone = np.array([served.ask({"text_input": text})["embedding"] for text in TEXTS])
    together = np.array([answer["embedding"] for answer in served.ask_tensors(_rows(list(TEXTS)))])
    cosines = (alone * together).sum(axis=1)
    assert cosines.min() > 0.97
    assert cosines.min() < 1 - 1e-6, "activations are quantised over the whole batch"


def test_concurrent_requests_of_unequal_length_share_executions(client: Callable[[str], Client]) -> None:
    served = client("minilm_fp32")
    alone = {text: served.ask({"text_input": text})["embedding"] for text in TEXTS}
    texts = list(TEXTS) * 6

    def flood() -> int:
        answers, executions = _at_once(served, [{"text_input": text} for text in texts])
        for text, answer in zip(texts, answers, strict=True):
            np.testing.assert_allclose(answer["embedding"], alone[text], atol=1e-5)
        return executions

    assert any(flood() < len(texts) / 2 for _ in range(TRIES))


def _at_once(served: Client, samples: list[dict[str, Any]]) -> tuple[list[Any], int]:
    """Return the answers to many samples, and the number of Triton's executions for them."""
    requests, executions = counted(settled(served))
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(served.ask, samples))
    after = counted(settled(served, requests + len(samples)))
    assert after[0] == requests + len(samples)
    return answers, after[1] - executions


def test_requests_with_other_label_counts_and_options_share_executions(client: Callable[[str], Client]) -> None:
    served = client("entail")
    samples = [
        {
            "text_input": TEXTS[i % 9],
            "candidate_labels": list("abcdefghijklmnopqrstuvwxyz"[: 9 + i % 17]),
            "multi_label": bool(i % 2),
        }
        for i in range(48)
    ]
    alone = [served.ask(sample) for sample in samples]

    def flood() -> int:
        answers, executions = _at_once(served, samples)
        error, where = difference(alone, answers)
        assert error < 1e-5, where
        return executions

    assert any(flood() < len(samples) * 3 / 4 for _ in range(TRIES))


def test_bad_requests_in_a_batch_get_their_own_errors(client: Callable[[str], Client]) -> None:
    served = client("topics")
    good = {"text_input": TEXTS[3]}
    expected = served.ask(good)
    bad = [{"text_input": b"\xff\xfe"}, {"text_input": "word " * 3000}, {"text_input": " "}]
    requests = [good, *bad] * 12

    def ask(sample: dict[str, object]) -> object:
        try:
            return served.ask(sample)
        except ServeError as error:
            return str(error)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, requests))
    messages = ("is not UTF-8", "the limit of this model is 512", "is empty")
    for index, answer in enumerate(answers):
        if index % 4 == 0:
            assert difference(expected, answer)[0] < 1e-5
        else:
            assert messages[index % 4 - 1] in str(answer)

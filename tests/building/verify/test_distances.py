"""Distances between the outputs of two models tell a change of precision from an unrelated model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from builder.checkpoints.distances import PairedNumbers, relative_distance
from builder.checkpoints.tasks import find_task
from builder.checkpoints.tasks.base import EncoderTask

REQUESTS = 30
TOLERANCE = 0.5
ALIKE = ("text-classification", "zero-shot-classification", "token-classification", "feature-extraction")


def _softmax(logits: np.ndarray) -> list[float]:
    exponents = np.exp(logits - logits.max())
    return [float(value) for value in exponents / exponents.sum()]


def _classified(logits: np.ndarray) -> dict[str, Any]:
    scores = dict(zip("abcd", _softmax(logits), strict=True))
    best = sorted(scores, key=lambda label: -scores[label])
    return {"label": best, "score": [scores[label] for label in best]}


def _masked(logits: np.ndarray) -> dict[str, Any]:
    scores = sorted(enumerate(_softmax(logits)), key=lambda one: -one[1])
    return {"predictions": json.dumps([{"token": token, "score": score} for token, score in scores])}


def _tagged(logits: np.ndarray) -> dict[str, Any]:
    scores = enumerate(_softmax(logits))
    return {
        "entities": json.dumps([{"start": n, "end": n + 1, "entity": "abcd"[n], "score": score} for n, score in scores])
    }


ANSWERS: Mapping[str, Any] = {
    "text-classification": _classified,
    "zero-shot-classification": _classified,
    "token-classification": _tagged,
    "fill-mask": _masked,
    "question-answering": lambda logits: {"answer": "Oslo", "score": _softmax(logits)[0]},
    "text-ranking": lambda logits: {"score": logits.tolist()},
    "feature-extraction": lambda logits: {"embedding": logits.tolist()},
    "sparse-embedding": lambda logits: {"indices": [3, 5, 8, 9], "values": np.abs(logits).tolist()},
}


def _apart(task: str, expected: np.ndarray, actual: np.ndarray) -> float:
    one = find_task(task)
    assert isinstance(one, EncoderTask)
    answer = ANSWERS[task]
    return relative_distance([one.numbers(answer(a), answer(b)) for a, b in zip(expected, actual, strict=True)])[0]


@pytest.mark.parametrize("spread", [0.01, 1.0])
@pytest.mark.parametrize("task", ANSWERS)
def test_distance_separates_unrelated_from_rounded_models(task: str, spread: float) -> None:
    """Regression: a classifier with other weights agreed by 1.0000, because most of its labels were the same.

    Models that are hardly trained, whose scores hardly vary, and models that are sure of their answers; `ALIKE`: where
    the unrelated one prefers the same labels.
    """
    generator = np.random.default_rng(0)
    usual = 3 * spread * np.array([1.0, -1.0, 0.5, -0.5]) if task in ALIKE else 0.0
    expected, unrelated = usual + spread * generator.normal(size=(2, REQUESTS, 4))
    rounded = expected + 0.1 * spread * generator.normal(size=expected.shape)
    assert _apart(task, expected, expected) == 0
    assert _apart(task, expected, rounded) < TOLERANCE
    assert _apart(task, expected, unrelated) > TOLERANCE


def test_distance_within_one_request_is_relative() -> None:
    assert relative_distance([{"score": PairedNumbers(np.array([2.0]), np.array([2.2]))}])[0] == pytest.approx(0.1)
    assert relative_distance([{"score": PairedNumbers(np.array([0.5]), np.array([0.5]), probabilities=True)}])[0] == 0


def test_distance_of_a_constant_mean_answer_is_one() -> None:
    values = np.array([1.0, 2.0, 3.0])
    found, where = relative_distance([{"score": PairedNumbers(values, np.full(3, 2.0))}])
    assert found == pytest.approx(1)
    assert "was 1 and is 2" in where


def test_distance_of_embeddings_of_different_sizes_is_largest() -> None:
    task = find_task("feature-extraction")
    assert isinstance(task, EncoderTask)
    pair: tuple[dict[str, Any], dict[str, Any]] = {"embedding": [1.0, 0.0]}, {"embedding": [1.0, 0.0, 0.0]}
    assert task.agreement(*pair) == 0
    assert relative_distance([task.numbers(*pair)])[0] == math.inf

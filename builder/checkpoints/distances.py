"""Difference of two answers, and the distance between the numbers of pairs of answers over many requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CERTAIN = 1e-6  # a probability nearer to 0 or 1 counts as this near
MIN_SPREAD = 1e-3  # of scores that do not vary between requests


def difference(expected: Any, actual: Any, path: str = "answer") -> tuple[float, str]:
    """Return the largest difference and where it is; infinite if something other than a number differs.

    Values are Python's; a str that contains JSON is compared by its JSON value. Numbers are compared relative to the
    larger of 1 and the expected size.
    """
    if isinstance(expected, str) and isinstance(actual, str) and expected != actual:
        try:
            return difference(json.loads(expected), json.loads(actual), path)
        except ValueError:
            return math.inf, f"{path}: {expected!r} became {actual!r}"
    if isinstance(expected, Mapping) and isinstance(actual, Mapping) and set(expected) <= set(actual):
        parts = [difference(value, actual[key], f"{path}.{key}") for key, value in expected.items()]
        return max(parts, default=(0.0, path))
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)) and len(expected) == len(actual):
        parts = [difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(expected, actual, strict=True))]
        return max(parts, default=(0.0, path))
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (expected, actual)):
        error = abs(expected - actual) / max(1.0, abs(expected))
        return (error, path) if not math.isnan(error) else (math.inf, f"{path}: {expected} became {actual}")
    if expected == actual:
        return 0.0, path
    return math.inf, f"{path}: {str(expected)[:80]!r} became {str(actual)[:80]!r}"


@dataclass(frozen=True)
class PairedNumbers:
    """Numbers of one kind in two answers: an observation a row. Probabilities are compared by their log-odds."""

    expected: np.ndarray
    actual: np.ndarray
    probabilities: bool = False

    def comparable(self) -> tuple[np.ndarray, np.ndarray]:
        """Return both with probabilities as log-odds, which do not saturate."""
        first, second = np.asarray(self.expected, np.float64), np.asarray(self.actual, np.float64)
        return (_log_odds(first), _log_odds(second)) if self.probabilities else (first, second)


def paired_scores(expected: Sequence[float], actual: Sequence[float]) -> PairedNumbers:
    """Return scores, which are probabilities where all of them can be."""
    first, second = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    both = np.concatenate([first, second])
    return PairedNumbers(first, second, bool(((both >= 0) & (both <= 1)).all()))


def relative_distance(answers: Sequence[Mapping[str, PairedNumbers]]) -> tuple[float, str]:
    """Return the distance between the numbers of pairs of answers, and where it is largest.

    It is the root mean square of the differences, divided by that of the expected numbers' distances from their means
    over the requests: 0 is equal, 1 is as far as an answer that is always the mean. Infinite if nothing is comparable.
    """
    errors = spread = 0.0
    count, largest, where = 0, -1.0, ""
    for kind in dict.fromkeys(kind for answer in answers for kind in answer):
        pairs = [answer[kind] for answer in answers if kind in answer]
        expected, actual = (np.concatenate(side) for side in zip(*(pair.comparable() for pair in pairs), strict=True))
        difference = np.abs(expected - actual)
        centre = expected.mean(axis=0) if (expected != expected[:1]).any() else 0.0  # one request has no mean
        errors, spread = errors + float((difference**2).sum()), spread + float(((expected - centre) ** 2).sum())
        count += expected.size
        if expected.size and (furthest := float(difference.max())) > largest:
            place = int(difference.argmax())
            before, after = (
                np.concatenate([np.asarray(side, np.float64) for side in sides]).flat[place]
                for sides in ([pair.expected for pair in pairs], [pair.actual for pair in pairs])
            )
            largest, where = furthest, f"{kind}, which was {before:.4g} and is {after:.4g}"
    if not count:
        return float("inf"), "there is nothing that both answers have"
    return float(np.sqrt(errors / max(spread, count * MIN_SPREAD**2))), where


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    clipped = np.clip(probabilities, CERTAIN, 1 - CERTAIN)
    odds: np.ndarray = np.log(clipped / (1 - clipped))
    return odds

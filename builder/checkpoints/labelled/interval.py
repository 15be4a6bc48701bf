"""Estimate how far a difference of two scores may be chance: the paired bootstrap.

B. Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979; paired for two systems on the same data by P. Koehn,
"Statistical Significance Tests for Machine Translation Evaluation", 2004.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 200
COVERAGE = 95  # percent


def difference_interval(
    score: Callable[[Sequence[Any]], Mapping[str, float]], pytorch: Sequence[Any], served: Sequence[Any]
) -> dict[str, tuple[float, float]]:
    """Return, by measure, the interval of the served score minus PyTorch's, if the data were drawn again.

    `pytorch`, `served`: what each text, query or question counts as, in one order.
    """
    return interval_of_draws(*(scores_of_draws(score, items) for items in (pytorch, served)))


def scores_of_draws(
    score: Callable[[Sequence[Any]], Mapping[str, float]], items: Sequence[Any]
) -> list[Mapping[str, float]]:
    """Return the scores of draws of `items`, the same draws for as many items; none of fewer than two."""
    count, random = len(items), np.random.default_rng(0)
    if count < 2:
        return []
    with warnings.catch_warnings(action="ignore"):  # of draws in which a measure is not defined
        return [
            score([items[place] for place in random.integers(count, size=count).tolist()]) for _ in range(RESAMPLES)
        ]


def interval_of_draws(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]
) -> dict[str, tuple[float, float]]:
    """Return, by measure, the interval of the differences of the scores of the same draws.

    Nothing without draws, nor for a measure that no draw has: Spearman's of equal labels is not defined.
    """
    differences: dict[str, list[float]] = {}
    for first, second in zip(before, after, strict=True):
        for name in first:
            if np.isfinite(difference := second[name] - first[name]):
                differences.setdefault(name, []).append(difference)
    outside = (100 - COVERAGE) / 2
    limits = {name: np.percentile(values, [outside, 100 - outside]) for name, values in differences.items()}
    return {name: (float(low), float(high)) for name, (low, high) in limits.items()}

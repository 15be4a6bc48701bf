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

    `pytorch`, `served`: what each text, query or question counts as, in one order. Nothing for fewer than two, nor for
    a measure that no draw has: Spearman's of equal labels is not defined.
    """
    count = len(pytorch)
    if count < 2:
        return {}
    random = np.random.default_rng(0)
    differences: dict[str, list[float]] = {}
    for _ in range(RESAMPLES):
        drawn = random.integers(count, size=count).tolist()
        with warnings.catch_warnings(action="ignore"):  # of draws in which a measure is not defined
            before, after = (score([items[place] for place in drawn]) for items in (pytorch, served))
        for name in before:
            if np.isfinite(difference := after[name] - before[name]):
                differences.setdefault(name, []).append(difference)
    outside = (100 - COVERAGE) / 2
    limits = {name: np.percentile(values, [outside, 100 - outside]) for name, values in differences.items()}
    return {name: (float(low), float(high)) for name, (low, high) in limits.items()}

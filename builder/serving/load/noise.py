"""Estimate the noise of figures: means of repeats with 95% intervals (Student's t), and whether two differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, variance

from scipy.special import stdtrit

QUANTILE = 0.975  # quantile of a two-sided interval of 95%


@dataclass(frozen=True)
class Estimate:
    """Mean, and half of its 95% interval, which is None for a single value: its noise is not known."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        count = len(values)
        if count < 2:
            return cls(values[0], None)
        return cls(mean(values), float(stdtrit(count - 1, QUANTILE)) * math.sqrt(variance(values) / count))

    def __str__(self) -> str:
        return _number(self.mean) if self.half is None else f"{_number(self.mean)} ±{_number(self.half)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


@dataclass(frozen=True)
class RelativeChange:
    """Difference of two means, as a share of the first.

    `half`: half of its 95% interval, None if either was not repeated.
    """

    share: float
    half: float | None

    @property
    def sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.half is not None and abs(self.share) > self.half

    def __str__(self) -> str:
        return f"{self.share:+.1%}" + ("" if self.half is None else f" ±{self.half:.1%}")


def compare_means(before: Sequence[float], after: Sequence[float]) -> RelativeChange | None:
    """Return by what share `after` is larger; None if `before` is 0. Welch: variances need not be equal."""
    base = mean(before)
    if base == 0:
        return None
    share = (mean(after) - base) / base
    counts = [len(before), len(after)]
    if min(counts) < 2:
        return RelativeChange(share, None)
    parts = [variance(values) / count for values, count in zip((before, after), counts, strict=True)]
    if sum(parts) == 0:
        return RelativeChange(share, 0.0)
    freedom = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return RelativeChange(share, float(stdtrit(freedom, QUANTILE)) * math.sqrt(sum(parts)) / abs(base))


def compare_pairs(before: Sequence[float], after: Sequence[float]) -> RelativeChange | None:
    """Return the change of values that were measured in alternating pairs, from the ratio of each pair.

    Whatever slows the machine for a while slows both values of a pair. None if a value is 0.
    """
    if min(*before, *after) <= 0:
        return None
    ratio = Estimate.of([math.log(new / old) for old, new in zip(before, after, strict=True)])
    share = math.expm1(ratio.mean)
    if ratio.half is None:
        return RelativeChange(share, None)
    nearest = math.expm1(ratio.mean - math.copysign(ratio.half, ratio.mean))
    return RelativeChange(share, abs(share - nearest))

"""Measure how slow each server of a fleet is, by the requests that it answers. Does no I/O and has no clock."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Generic, TypeVar

ANSWER_WEIGHT = 0.3  # of the last answer in a server's mean
KEPT_BY_CHECK = 0.85  # share of its excess that a server keeps after each check, one a second: half after four seconds
MAX_RATIO = 10.0  # of one answer
MIN_SLOWNESS = 1.5  # below this a mean counts as usual: requests of one kind differ by up to as much on one server
MIN_PACE_WEIGHT = 0.05  # of the last answer in the usual pace of its kind, which is a mean of the first ones
T = TypeVar("T")


class SlownessMeter:
    """Moving average of a server's times as multiples of the usual ones of its models: 2.0 for twice as long.

    A server that has no requests returns to 1.0. So it is tried again, whether it is still slow or not.
    """

    def __init__(self) -> None:
        self.mean = 1.0

    @property
    def slowness(self) -> float:
        """Return the average, or 1.0 if it is nearly usual. A fast server counts as usual, or it would get all."""
        return self.mean if self.mean >= MIN_SLOWNESS else 1.0

    def record(self, ratio: float) -> None:
        """Record an answer."""
        self.mean += ANSWER_WEIGHT * (min(ratio, MAX_RATIO) - self.mean)

    def forget(self) -> None:
        """Forget a part of what was measured. To be called regularly."""
        self.mean = 1.0 + KEPT_BY_CHECK * (self.mean - 1.0)


class ModelTimes(Generic[T]):
    """Times of the requests to each model."""

    def __init__(self) -> None:
        self.models: dict[str, T] = {}

    def keep_only(self, models: Container[str]) -> None:
        """Forget all other models."""
        for model in [model for model in self.models if model not in models]:
            del self.models[model]


class UsualPaces(ModelTimes[dict[object, tuple[float, int]]]):
    """Usual pace of each kind of request to a model until its first answer, over all servers.

    It includes the time in queues, so that a server that others keep busy is slow. A request costs something between a
    fixed time and a time per token: the pace is in seconds per root of the tokens, and requests with up to four times
    the tokens are one kind, so that neither their length nor their cost makes a server slow. A pace is kept with the
    number of requests.
    """

    def ratio(self, model: str, kind: object, tokens: int, seconds: float) -> float:
        """Record a first answer. Return the ratio of its time to the usual one before."""
        pace, paces = seconds / math.sqrt(tokens), self.models.setdefault(model, {})
        key = kind, length_class(tokens)
        usual, count = paces.get(key, (pace, 0))
        paces[key] = usual + max(MIN_PACE_WEIGHT, 1 / (count + 1)) * (pace - usual), count + 1
        return pace / usual if usual else 1.0


def length_class(tokens: int) -> int:
    """Return the class of a request's length: requests of one class differ by up to four times."""
    return tokens.bit_length() // 2

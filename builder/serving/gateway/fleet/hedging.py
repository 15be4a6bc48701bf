"""Decide when a request is sent to a second server, by the times of a model's recent answers. Has no clock."""

from __future__ import annotations

import math
from collections import deque

from builder.serving.gateway.fleet.slowness import ModelTimes, length_class

RECENT_ANSWERS = 100  # of requests of about the same length to one model
MIN_ANSWERS = 20  # until there are as many, no request is sent twice


class AnswerTimes(ModelTimes[dict[int, deque[float]]]):
    """Times of the last answers of each model, for each kind of request: those with up to four times the tokens."""

    def __init__(self, percentile: int) -> None:
        super().__init__()
        self.percentile = percentile

    def record(self, model: str, tokens: int, seconds: float) -> None:
        """Record an answer to a request of so many tokens."""
        kinds = self.models.setdefault(model, {})
        kinds.setdefault(length_class(tokens), deque(maxlen=RECENT_ANSWERS)).append(seconds)

    def hedge_after_s(self, model: str, tokens: int) -> float:
        """Return after how long a request is sent again: the percentile of recent times; infinite with too few."""
        times = self.models.get(model, {}).get(length_class(tokens), ())
        if len(times) < MIN_ANSWERS:
            return math.inf
        return sorted(times)[min(len(times) - 1, len(times) * self.percentile // 100)]

"""Eject a server, or one model on it, after consecutive failures, and let it return after a growing delay."""

from __future__ import annotations

from dataclasses import dataclass, field

from builder.serving.server.backoff import Backoff

FAILURES = 3  # in a row, after which no more requests are sent
MAX_EJECTION_S = 30.0
FORGET_AFTER_S = 60.0  # without a failure, earlier ejections are forgotten


@dataclass
class Health:
    """Health by the outcome of real requests. After an ejection, one more failure ejects again, for twice as long."""

    failures: int = 0  # in a row
    backoff: Backoff = field(default_factory=lambda: Backoff(MAX_EJECTION_S, FORGET_AFTER_S))

    def is_ejected(self, now: float) -> bool:
        return now < self.backoff.due

    def record_success(self) -> None:
        self.failures = 0

    def record_failure(self, now: float) -> bool:
        """Record a failed request. Return True if it causes an ejection.

        Failures during an ejection are those of requests sent before it, and do not prolong it.
        """
        if self.is_ejected(now):
            return False
        self.failures += 1
        if self.failures < FAILURES:
            return False
        self.eject(now)
        return True

    def eject(self, now: float) -> None:
        """Send no more requests for a while, even after a single failure."""
        if not self.is_ejected(now):
            self.failures = FAILURES - 1
            self.backoff.fail(now)

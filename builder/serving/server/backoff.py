"""Compute exponential delays before the restarts of a process or model that fails repeatedly."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_RESTARTS = 5  # consecutive failures


@dataclass
class Backoff:
    """Delays of 1, 2, 4 seconds and so on, at most `max_delay_s`, after up to `max_failures` in a row.

    Failures are forgotten when none followed within `steady_s` of an attempt.
    """

    max_delay_s: float
    steady_s: float
    max_failures: float = math.inf
    failures: int = 0
    due: float = -math.inf  # time of the next attempt

    def fail(self, now: float, *, first_at_once: bool = False) -> float:
        """Record a failure. Return the seconds until the next attempt, math.inf if there is none.

        `first_at_once`: each delay is one second shorter, which makes the first one 0.
        """
        self.failures = 1 if now - self.due >= self.steady_s else self.failures + 1
        if self.failures > self.max_failures:
            self.due = now
            return math.inf
        delay = min(self.max_delay_s, 2.0 ** (self.failures - 1) - first_at_once)
        self.due = now + delay
        return delay


def restart_backoff() -> Backoff:
    """Return the backoff of a server, gateway or model that `serve` starts again: 0, 1, 3, 7 and 15 s, then never."""
    return Backoff(max_delay_s=30.0, steady_s=300.0, max_failures=MAX_RESTARTS)

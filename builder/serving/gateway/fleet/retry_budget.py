"""Limit retries to a share of the requests, so that a fleet that fails is not asked several times as much."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_SHARE = 0.2  # of the requests
RESERVE = 100.0  # retries that are possible at once: as many requests may run on a server that dies
RESERVE_PER_S = 10.0  # by which the reserve fills again where there are few requests


@dataclass
class RetryBudget:
    """Retries left. Requests add to it, retries take from it, and time fills it up to RESERVE."""

    left: float = RESERVE
    filled_at: float | None = None  # time of the last change; None before the first

    def add_request(self, now: float) -> None:
        self._fill(now, RETRY_SHARE)

    def take_retry(self, now: float) -> bool:
        """Return True if a retry is allowed now, and count it."""
        self._fill(now, 0.0)
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True

    def _fill(self, now: float, more: float) -> None:
        elapsed_s = 0.0 if self.filled_at is None else now - self.filled_at
        self.left = min(RESERVE, self.left + more + RESERVE_PER_S * elapsed_s)
        self.filled_at = now

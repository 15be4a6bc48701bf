"""Backoff for models that fail to load, or die: when the next attempt is due, and the error until then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.offered import Stamp

LONGEST_S = 60.0
PATIENCE_S = 2.0  # that requests wait for the next attempt at a model that died
STEADY_S = 60.0  # after so long without a failure, earlier ones are forgotten
ANSWERED_S = 10.0  # loading does not kill a model that answered for this long: it is reloaded at once


@dataclass(frozen=True)
class Failure:
    """`times` failures in a row, the last with `reason`; no retry before `until`, unless the model changes."""

    stamp: Stamp
    times: int
    until: float
    reason: str
    died: bool


class Backoff:
    """Exponential backoff: 1, 2, 4 seconds and so on after failed loads; after deaths one second less.

    The first retry after a death is therefore immediate.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.failures: dict[str, Failure] = {}

    def waits(self, name: str, stamp: Stamp) -> bool:
        """Return True if a model may not be tried yet."""
        return self._left(name, stamp) > 0

    def pause(self, name: str, stamp: Stamp) -> float:
        """Return the seconds to wait before the next attempt at a model.

        Raises ApiError 503 with the reason if the model does not load, or died and has to wait longer than PATIENCE_S.
        """
        left = self._left(name, stamp)
        if left <= 0:
            return 0.0
        known = self.failures[name]
        if not known.died or left > PATIENCE_S:
            raise failed(name, known.reason, left)
        return left

    def _left(self, name: str, stamp: Stamp) -> float:
        known = self.failures.get(name)
        return known.until - self.now() if known is not None and known.stamp == stamp else 0.0

    def note_death(self, name: str, stamp: Stamp, reason: str, answered_s: float) -> None:
        """Record that a model died after answering for `answered_s` seconds."""
        if answered_s >= ANSWERED_S:
            self.failures.pop(name, None)
        self.note(name, stamp, reason, died=True)

    def note(self, name: str, stamp: Stamp, reason: str, *, died: bool = False) -> float:
        """Record a failure. Returns the seconds until the next attempt."""
        known = self.failures.get(name)
        in_a_row = known is not None and known.stamp == stamp and self.now() - known.until < STEADY_S
        times = known.times + 1 if known is not None and in_a_row else 1
        delay = min(LONGEST_S, 2.0 ** (times - 1) - died)
        self.failures[name] = Failure(stamp, times, self.now() + delay, reason, died)
        return delay


def failed(name: str, reason: str, retry_s: float) -> ApiError:
    """Return the error for a model that does not load."""
    return ApiError(
        503,
        f"{name} does not load: {reason.strip()}; it is tried again in {max(1, round(retry_s))} s",
        code="model_failed",
        retry_after=retry_s,
    )

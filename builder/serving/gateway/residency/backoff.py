"""Delay further attempts at models that fail to load, or die, and refuse their requests until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.repository_models import Stamp
from builder.serving.server.backoff import Backoff

MAX_DELAY_S = 60.0
MAX_WAIT_S = 2.0  # longest wait of a request for the next attempt at a model that died
FORGET_AFTER_S = 60.0  # without a failure, earlier ones are forgotten
STABLE_AFTER_S = 10.0  # a model that answered for this long before it died is reloaded at once


@dataclass
class Failure:
    """The last failure of a model; it is not retried before `backoff.due`, unless its `stamp` changes."""

    stamp: Stamp
    backoff: Backoff = field(default_factory=lambda: Backoff(MAX_DELAY_S, FORGET_AFTER_S))
    reason: str = ""
    died: bool = False


class LoadBackoff:
    """Exponential backoff of each model after failed loads and deaths; the first retry after a death is immediate."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.failures: dict[str, Failure] = {}

    def is_waiting(self, name: str, stamp: Stamp) -> bool:
        """Return True if a model may not be tried yet."""
        return self._remaining(name, stamp) > 0

    def pause(self, name: str, stamp: Stamp) -> float:
        """Return the seconds to wait before the next attempt at a model.

        Raises ApiError 503 with the reason if the model does not load, or died and has to wait longer than MAX_WAIT_S.
        """
        remaining = self._remaining(name, stamp)
        if remaining <= 0:
            return 0.0
        known = self.failures[name]
        if not known.died or remaining > MAX_WAIT_S:
            raise failed(name, known.reason, remaining)
        return remaining

    def _remaining(self, name: str, stamp: Stamp) -> float:
        known = self.failures.get(name)
        return known.backoff.due - self.now() if known is not None and known.stamp == stamp else 0.0

    def record_death(self, name: str, stamp: Stamp, reason: str, answered_s: float) -> None:
        """Record that a model died after answering for `answered_s` seconds."""
        if answered_s >= STABLE_AFTER_S:
            self.failures.pop(name, None)
        self.record_failure(name, stamp, reason, died=True)

    def record_failure(self, name: str, stamp: Stamp, reason: str, *, died: bool = False) -> float:
        """Record a failure. Returns the seconds until the next attempt."""
        known = self.failures.get(name)
        if known is None or known.stamp != stamp:
            known = self.failures[name] = Failure(stamp)
        known.reason, known.died = reason, died
        return known.backoff.fail(self.now(), first_at_once=died)


def failed(name: str, reason: str, retry_s: float) -> ApiError:
    """Return the error for a model that does not load."""
    return ApiError(
        503,
        f"{name} does not load: {reason.strip()}; it is tried again in {max(1, round(retry_s))} s",
        code="model_failed",
        retry_after=retry_s,
    )

"""Limit the concurrent requests to a model.

A generating model has its own queue, which refuses at once. An encoder's front model checks its queue only once a
second while it is busy, so the gateway refuses the excess request immediately.
"""

from __future__ import annotations

from collections import Counter

from builder.serving.gateway.errors import queue_full


class ConcurrencyLimit:
    """Admits at most `limit` concurrent requests to each model."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: Counter[str] = Counter()

    def acquire(self, name: str) -> None:
        """Take one slot of a model. Raises ApiError 429 if all slots are taken."""
        if self.running[name] >= self.limit:
            raise queue_full(f"{self.limit} requests of {name} wait already")
        self.running[name] += 1

    def release(self, name: str) -> None:
        self.running[name] -= 1

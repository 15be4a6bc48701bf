"""Limit of the requests of one model that wait at once.

A model that generates has its own queue, which refuses at once. An encoder's front model checks its queue only once a
second while it is busy, so the gateway refuses the excess request immediately.
"""

from __future__ import annotations

from collections import Counter

from builder.serving.gateway.errors import ApiError

RETRY_S = 1


class Bound:
    """Counter that admits at most `most` concurrent requests of each model."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.running: Counter[str] = Counter()

    def enter(self, name: str) -> None:
        """Take one slot of a model. Raises ApiError 429 if all slots are taken."""
        if self.running[name] >= self.most:
            raise ApiError(
                429,
                f"{self.most} requests of {name} wait already, which is the limit; send this one again later",
                code="queue_full",
                retry_after=RETRY_S,
            )
        self.running[name] += 1

    def leave(self, name: str) -> None:
        """Release one slot."""
        self.running[name] -= 1

"""How many requests of one model may wait for it at once.

A model that generates has a queue of its own, which refuses at once. The front of an encoder looks how many wait once a
second while it is busy; here the next one is refused at once.
"""

from __future__ import annotations

from collections import Counter

from builder.gateway.errors import ApiError

RETRY_S = 1


class Bound:
    """At most `most` requests of each model."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.running: Counter[str] = Counter()

    def enter(self, name: str) -> None:
        """One more request of a model. Raises ApiError 429 where there are as many as may be."""
        if self.running[name] >= self.most:
            raise ApiError(
                429,
                f"{self.most} requests of {name} wait already, which is the limit; send this one again later",
                code="queue_full",
                retry_after=RETRY_S,
            )
        self.running[name] += 1

    def leave(self, name: str) -> None:
        """It is over."""
        self.running[name] -= 1

"""Measure how slow each server of a fleet is, by the requests that it answers. Does no I/O and has no clock."""

from __future__ import annotations

NEW = 0.3  # weight of the last answer in a server's slowness
KEPT = 0.85  # share of its excess that a server keeps after each check, one a second: half of it after four seconds
MAX_RATIO = 10.0  # of one answer
NEW_USUAL = 0.05  # weight of the last answer in the usual time of its model, which is a mean of the first ones


class Slowness:
    """Moving average of a server's times as multiples of the usual ones of its models: 2.0 for twice as long.

    A server that has no requests returns to 1.0. So it is tried again, whether it is still slow or not.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def record(self, ratio: float) -> None:
        """Record an answer. One that was fast by chance counts as usual, or its server would get all requests."""
        self.value += NEW * (min(max(1.0, ratio), MAX_RATIO) - self.value)

    def forget(self) -> None:
        """Forget a part of what was measured. To be called regularly."""
        self.value = 1.0 + KEPT * (self.value - 1.0)


class UsualTimes:
    """Usual seconds per token of each kind of request until its first answer, over all servers.

    They include the time in queues, so that a server that others keep busy is slow.
    """

    def __init__(self) -> None:
        self.paces: dict[object, tuple[float, int]] = {}  # with the number of requests

    def ratio(self, kind: object, tokens: int, seconds: float) -> float:
        """Record a first answer. Return the ratio of its time to the usual one before."""
        pace = seconds / tokens
        usual, count = self.paces.get(kind, (pace, 0))
        self.paces[kind] = usual + max(NEW_USUAL, 1 / (count + 1)) * (pace - usual), count + 1
        return pace / usual if usual else 1.0

"""Times at which each request was sent and its tokens came: every side of a table is judged by them.

Imports only Python's own library, because it runs in the environments of the peers.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from statistics import median


class Clock:
    """Clock of requests. `tokens` of a request may come together; for a group at once, report each member."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._sent: dict[Hashable, float] = {}
        self._first: dict[Hashable, tuple[float, int]] = {}
        self._last: dict[Hashable, tuple[float, int]] = {}
        self._came: list[tuple[float, int]] = []

    def send(self, request: Hashable) -> None:
        self._sent[request] = time.perf_counter()

    def tokens(self, request: Hashable, count: int = 1) -> None:
        """Record `count` more tokens of `request`."""
        now, before = time.perf_counter(), self._last.get(request, (0.0, 0))[1]
        self._first.setdefault(request, (now, count))
        self._last[request] = (now, before + count)
        self._came.append((now, count))

    def figures(self) -> dict[str, float]:
        """Return the tokens, their rate from the start to the last one, and two medians over requests in milliseconds.

        The medians are the time to the first token, and the time from each token to the next after that.
        `decode_tokens_per_s`, if all requests were answered at once for a while: the rate of that while.
        """
        end = max(at for at, _ in self._last.values())
        counted = sum(count for _, count in self._last.values())
        opened, closed = max(at for at, _ in self._first.values()), min(at for at, _ in self._last.values())
        at_once = sum(count for at, count in self._came if opened < at <= closed)
        between = []
        for request, (last, count) in self._last.items():
            first, together = self._first[request]
            if count > together:
                between.append((last - first) / (count - together))
        return {
            "tokens": counted,
            "tokens_per_s": counted / (end - self.start),
            "first_token_ms": 1000 * median(at - self._sent[name] for name, (at, _) in self._first.items()),
            "inter_token_ms": 1000 * median(between) if between else 0.0,
            **({"decode_tokens_per_s": at_once / (closed - opened)} if at_once else {}),
        }

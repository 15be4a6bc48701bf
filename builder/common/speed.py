"""Times, and how to compare them.

Needs only the standard library, so that commands that read a report start at once.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

PROCESS_STARTED = datetime.now(UTC).isoformat(timespec="milliseconds")  # times of one process can be compared
Latencies = dict[str, float]  # by shape, such as "8x128" for 8 rows of 128 tokens: median milliseconds


def speed_up(latency: Latencies, base: Latencies) -> float:
    """Return how many times `latency` is faster than `base`, as the geometric mean over the shapes.

    It is 1 if either was not timed.
    """
    if not base or not latency:
        return 1.0
    return math.exp(sum(math.log(base[cell] / latency[cell]) for cell in base) / len(base))

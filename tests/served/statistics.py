"""What Triton counted of a model."""

from __future__ import annotations

import time
from typing import Any

from builder.serve.client import Client


def settled(served: Client) -> dict[str, Any]:
    """Triton's counts once they no longer change: it counts a request a little after it has answered it."""
    last = served.statistics()
    while True:
        time.sleep(0.3)
        now = served.statistics()
        if now == last:
            return now
        last = now

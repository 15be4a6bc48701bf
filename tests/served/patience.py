"""Waiting for asynchronous events on machines of any speed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def comes_about(condition: Callable[[], bool], patience_s: float = 300) -> bool:
    """Return True if `condition` becomes true within `patience_s`."""
    end = time.monotonic() + patience_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def listens(port: int) -> bool:
    """Return True if something listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

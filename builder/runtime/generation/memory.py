"""Memory that large requests leave with the process, given back to the system.

A text of 420 kB leaves 40 to 56 MB behind when it has been tokenised: freed, but kept by the C library for the next.
"""

from __future__ import annotations

import ctypes
import time

EVERY_S = 30.0


class Housekeeping:
    """Calls glibc's malloc_trim now and then, which took 13 ms for those 56 MB; does nothing on another C library."""

    def __init__(self) -> None:
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.done = time.monotonic()

    def tidy(self) -> None:
        """Give back what is free, unless that was done a short while ago."""
        now = time.monotonic()
        if self.trim is not None and now - self.done >= EVERY_S:
            self.trim(0)
            self.done = now

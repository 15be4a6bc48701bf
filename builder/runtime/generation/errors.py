"""Why the decode loop does not answer a request; the adapter turns each into Triton's code for it."""

from __future__ import annotations


class QueueFull(RuntimeError):
    """No room for another request."""


class DeadlineExceeded(RuntimeError):
    """The request's time was over before its answer was complete."""


class EngineFailed(RuntimeError):
    """A step failed: nothing that runs or waits can be answered."""

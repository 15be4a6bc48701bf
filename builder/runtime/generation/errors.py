"""Define why the decode loop does not answer a request; the adapter maps each error to Triton's error code."""

from __future__ import annotations


class QueueFull(RuntimeError):
    """The queue is full."""


class DeadlineExceeded(RuntimeError):
    """The request's timeout passed before its answer was complete."""


class DecodeLoopFailed(RuntimeError):
    """A step failed, so no running or waiting request can be answered."""

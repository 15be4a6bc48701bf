"""Calls that nobody will answer: Triton keeps what the process of a model had when it died.

It answers with an error what is in execute(), and never what a front had taken to answer later (python_backend,
src/python_be.cc, ProcessRequests). What shows it is that the model was not ready for a time, until its process was
started again. A version that is unloaded is not ready either; but it soon answers what it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LOOK_S = 0.5  # from one look whether a model is ready, which has a call to answer, to the next
LOST_S = 60.0  # after a model was not ready, and its calls of before are lost


class Lost(Exception):
    """Nobody will answer a call."""


class Losses:
    """When models were last seen not to be ready, by their names."""

    def __init__(self) -> None:
        self.away: dict[str, float] = {}
        self.looked: dict[str, float] = {}  # when each was last asked

    async def answered(self, running: asyncio.Future[Any], model: str, ready: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a call of `model` that was just sent, and goes on where this is cancelled. Raises Lost."""
        sent, since = time.monotonic(), None
        while not (await asyncio.wait({running}, timeout=LOOK_S))[0]:
            await self._look(model, ready)
            if since is None and self.away.get(model, sent) > sent:
                since = time.monotonic()
            if since is not None and time.monotonic() - since > LOST_S:
                raise Lost

    async def _look(self, model: str, ready: Callable[[], Awaitable[bool]]) -> None:
        """Once for all calls of a model."""
        if time.monotonic() - self.looked.get(model, -LOOK_S) >= LOOK_S:
            self.looked[model] = time.monotonic()
            if not await ready():
                self.away[model] = time.monotonic()

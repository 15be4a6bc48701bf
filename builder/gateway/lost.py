"""Calls that nobody will answer: Triton keeps what the process of a model had when it died.

It answers with an error what is in execute(), and never what a front had taken to answer later (python_backend,
src/python_be.cc, ProcessRequests). What shows it is that the model was not ready for a time, until its process was
started again. A version that is unloaded is not ready either; but it soon answers what it has. And of several servers
behind one name, another may answer a look than the call: while one of them is not ready, nothing counts as lost, but
for a stream that has begun and goes silent then, for its next piece is at most some steps away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LOOK_S = 0.5  # from one look whether a model is ready, which has a call to answer, to the next
LOST_S = 60.0  # after a model was last not ready, and its calls of before are lost
SILENT_S = 15.0  # of a stream that has begun and whose model was not ready meanwhile, which is lost then


class Lost(Exception):
    """Nobody will answer a call."""


class Losses:
    """When models were last seen not to be ready, by their names."""

    def __init__(self) -> None:
        self.away: dict[str, float] = {}
        self.looks: dict[str, asyncio.Task[None]] = {}

    async def answered(
        self, running: asyncio.Future[Any], model: str, ready: Callable[[], Awaitable[bool]], begun: bool = False
    ) -> None:
        """Wait for a call of `model` that was just sent, or for the next piece of a stream that has `begun`.

        What is waited for goes on where this is cancelled. Raises Lost.
        """
        sent = time.monotonic()
        while not (await asyncio.wait({running}, timeout=LOOK_S))[0]:
            if model not in self.looks:
                self.looks[model] = asyncio.ensure_future(self._look(model, ready))
            away, now = self.away.get(model, sent), time.monotonic()
            if away > sent and (now - away > LOST_S or (begun and now - sent > SILENT_S)):
                raise Lost

    async def _look(self, model: str, ready: Callable[[], Awaitable[bool]]) -> None:
        """One at a time for all calls of a model, and none waits for it: a busy server takes long to say."""
        try:
            if not await ready():
                self.away[model] = time.monotonic()
            await asyncio.sleep(LOOK_S)
        finally:
            del self.looks[model]

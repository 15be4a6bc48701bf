"""Calls that nobody will answer: Triton keeps what the process of a model had when it died.

It answers with an error what is in execute(), and never what a front had taken to answer later (python_backend,
src/python_be.cc, ProcessRequests). What shows it is that the model was not ready for a time, until its process was
started again. A version that is unloaded is not ready either; but it soon answers what it has. And of several servers
behind one name, another may answer a look than the call: while one of them is not ready, nothing counts as lost but a
stream that has begun, when nothing comes of it for long. What generates may take minutes to say anything, and is given
them after its model was away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LOOK_S = 0.5  # from one look whether a model is ready, which has a call to answer, to the next
LOST_S = 60.0  # after a model was last not ready, and its calls of before are lost
GENERATED_S = 300.0  # the same of a stream that has not begun: it may be a whole answer
SILENT_S = 60.0  # of a stream that has begun and whose model was not ready meanwhile, which is lost then


class Lost(Exception):
    """Nobody will answer a call."""


class Losses:
    """When models were last seen not to be ready, by their names."""

    def __init__(self) -> None:
        self.away: dict[str, float] = {}
        self.looks: dict[str, asyncio.Task[None]] = {}

    async def answered(
        self,
        running: asyncio.Future[Any],
        model: str,
        ready: Callable[[], Awaitable[bool]],
        since: float | None = None,
        begun: bool = False,
    ) -> None:
        """Wait for a call of `model` that was just sent, or for the next piece of a stream, which may have `begun`.

        `since`: when the stream last gave something, or was made. What is waited for goes on where this is cancelled.
        Raises Lost.
        """
        waits = time.monotonic()
        whole, since = since is None, waits if since is None else since
        while not (await asyncio.wait({running}, timeout=LOOK_S))[0]:
            if model not in self.looks:
                self.looks[model] = asyncio.ensure_future(self._look(model, ready))
            away, now = self.away.get(model, since), time.monotonic()
            lost_s = LOST_S if whole else GENERATED_S
            if away > since and (now - waits > SILENT_S if begun else now - away > lost_s):
                raise Lost

    async def _look(self, model: str, ready: Callable[[], Awaitable[bool]]) -> None:
        """One at a time for all calls of a model, and none waits for it: a busy server takes long to say."""
        try:
            if not await ready():
                self.away[model] = time.monotonic()
            await asyncio.sleep(LOOK_S)
        finally:
            del self.looks[model]

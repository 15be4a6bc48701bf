"""Calls that will never be answered: Triton keeps a model's requests when the model's process dies.

It answers with an error for requests in execute(), but never for those that a front answers later (python_backend,
src/python_be.cc, ProcessRequests). The sign is that the model was not ready for a time, until its process was
restarted. A version that is unloaded is not ready either, but soon answers what it has. Of several servers behind one
name, the readiness check may reach another server than the call: while one of them is not ready, only a stream that has
begun counts as lost, if it stays silent for long. A generating model may take minutes until its first piece, and gets
them after its model was away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LOOK_S = 0.5  # between two readiness checks of a model with pending calls
LOST_S = 60.0  # after a model was last not ready, its earlier calls are lost
GENERATED_S = 300.0  # the same for a stream that has not begun, which may be a whole answer
SILENT_S = 60.0  # silence of a begun stream that counts as a loss, if its model was not ready meanwhile


class Lost(Exception):
    """A call will not be answered."""


class Losses:
    """Times at which models were last seen not to be ready, by name."""

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

        `since`: when the stream last gave a piece, or was created. Cancelling this leaves `running` alone. Raises Lost.
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
        """Check a model once for all of its calls. No call waits for it: a busy server answers slowly."""
        try:
            if not await ready():
                self.away[model] = time.monotonic()
            await asyncio.sleep(LOOK_S)
        finally:
            del self.looks[model]

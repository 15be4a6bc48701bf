"""Calls whose client disconnected: cancelled if the server can cancel safely, otherwise drained in the background.

A call without an answer after LONGEST_S is cancelled in any case, so that a gateway does not keep the calls of
processes that died. Before release 25.06, a cancellation that meets the answer crashes Triton, or makes it keep the
request, and so its model, forever (server, issue 7368, pull requests 7840, 8078 and 8220). For streams see
builder.serving.gateway.streams.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from builder.common.releases import version_tuple
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.lost import Losses, Lost

TAKES_CANCELLING = (2, 59)  # first server version that cancels safely: release 25.06
MOST = 256  # abandoned calls of one model
LONGEST_S = 600.0  # time limit of an abandoned call


class Leaving:
    """Waits for calls, and drains or cancels the abandoned ones.

    `version`: returns the server's version, such as "2.51.0"; "" if it does not answer.
    """

    def __init__(self, version: Callable[[], Awaitable[str]]) -> None:
        self.version = version
        self.known = ""
        self.left: Counter[str] = Counter()
        self.losses = Losses()
        self.ends: set[asyncio.Task[None]] = set()

    async def answer(self, model: str, call: Awaitable[Any], ready: Callable[[], Awaitable[bool]]) -> Any:
        """Return the result of a call of `model`. Raises its errors, Lost, and ApiError 429 (too many abandoned calls).

        `ready` tells whether the model is ready.
        """
        if self.left[model] >= MOST:
            raise ApiError(
                429,
                f"{MOST} requests of {model} are on their way whose clients left; send this one again later",
                code="queue_full",
                retry_after=1,
            )
        running = asyncio.ensure_future(call)
        try:
            await self.losses.answered(running, model, ready)
        except asyncio.CancelledError:
            if not running.done():
                self.end(self._counted(model, running))
            raise
        except Lost:
            self.end(self._end(running))
            raise
        return running.result()

    def end(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background."""
        task = asyncio.ensure_future(work)
        self.ends.add(task)
        task.add_done_callback(self.ends.discard)

    async def _counted(self, model: str, running: asyncio.Future[Any]) -> None:
        self.left[model] += 1
        try:
            await self._end(running)
        finally:
            self.left[model] -= 1

    async def _end(self, running: asyncio.Future[Any]) -> None:
        self.known = self.known or await self.version()
        if version_tuple(self.known) >= TAKES_CANCELLING:
            running.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(LONGEST_S):
                await running

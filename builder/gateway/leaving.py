"""Calls whose caller has left: cancelled at once on a server that takes it, and waited for elsewhere, by nobody.

What has no answer after LONGEST_S is cancelled there too, or a gateway would keep the calls of processes that died.
Until release 25.06 a cancellation that meets the answer ends Triton, or has it keep the request, and so its model,
for ever (server, issue 7368, pull requests 7840, 8078 and 8220). What becomes of streams, builder.gateway.streams says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from builder.gateway.errors import ApiError
from builder.gateway.lost import Losses, Lost
from builder.triton.releases import version_tuple

TAKES_CANCELLING = (2, 59)  # the server of release 25.06
MOST = 256  # calls of one model that nobody waits for
LONGEST_S = 600.0  # that such a call may take


class Leaving:
    """`version`: what the server says that it is, "2.51.0"; "" where it does not answer."""

    def __init__(self, version: Callable[[], Awaitable[str]]) -> None:
        self.version = version
        self.known = ""
        self.left: Counter[str] = Counter()
        self.losses = Losses()
        self.ends: set[asyncio.Task[None]] = set()

    async def answer(self, model: str, call: Awaitable[Any], ready: Callable[[], Awaitable[bool]]) -> Any:
        """What a call of `model`, which is `ready` or not, comes to. Raises what it raises, ApiError 429 where too many
        of them were left, and Lost."""
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
        """Have `work` done that nobody waits for."""
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

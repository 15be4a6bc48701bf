"""Cancel abandoned calls, whose client disconnected, if the server can cancel safely; drain them otherwise.

A call without an answer after ABANDONED_TIMEOUT_S is cancelled in any case, so that a gateway does not keep the calls
of processes that died. Before release 25.06, a cancellation that meets the answer crashes Triton, or makes it keep the
request, and so its model, forever (server, issue 7368, pull requests 7840, 8078 and 8220). For streams see
builder.serving.gateway.triton_stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from builder.common.releases import version_tuple
from builder.serving.gateway.backend_lost import BackendLost, IsReady, LossDetector
from builder.serving.gateway.errors import queue_full

SAFE_CANCEL_VERSION = (2, 59)  # first server version that cancels safely: release 25.06
MAX_ABANDONED_CALLS = 256  # of one model
ABANDONED_TIMEOUT_S = 600.0


class AbandonedCalls:
    """Tracks calls, and drains or cancels the abandoned ones.

    `version`: returns the server's version, such as "2.51.0"; "" if it does not answer.
    """

    def __init__(self, version: Callable[[], Awaitable[str]]) -> None:
        self.version = version
        self.server_version = ""
        self.counts: Counter[str] = Counter()  # abandoned calls of each model
        self.detector = LossDetector()
        self.tasks: set[asyncio.Task[None]] = set()

    async def wait_for(self, model: str, call: Awaitable[Any], is_ready: IsReady) -> Any:
        """Return the result of a call of `model`. Raises its errors, BackendLost and ApiError 429.

        `is_ready`: returns whether the model is ready.
        """
        if self.counts[model] >= MAX_ABANDONED_CALLS:
            reason = f"{MAX_ABANDONED_CALLS} requests of {model}, whose clients disconnected, are still running"
            raise queue_full(reason)
        running = asyncio.ensure_future(call)
        try:
            await self.detector.wait(running, model, is_ready)
        except asyncio.CancelledError:
            if not running.done():
                self.counts[model] += 1
                task = self.run_in_background(self._drain(running))
                task.add_done_callback(lambda _: self.counts.subtract([model]))
            raise
        except BackendLost:
            self.run_in_background(self._drain(running))
            raise
        return running.result()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _drain(self, running: asyncio.Future[Any]) -> None:
        """Cancel a call if the server can cancel safely, and wait for its end."""
        self.server_version = self.server_version or await self.version()
        if version_tuple(self.server_version) >= SAFE_CANCEL_VERSION:
            running.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(ABANDONED_TIMEOUT_S):
                await running

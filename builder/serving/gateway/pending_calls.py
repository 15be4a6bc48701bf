"""Detect calls that Triton will never answer, and end those whose client disconnected.

Triton keeps a model's requests when the model's process dies. Requests in execute() fail with an error, but requests
that a front answers later are dropped silently (python_backend, src/python_be.cc, ProcessRequests). The only sign is
that the model is not ready until its process has been restarted. An unloaded version is not ready either, but answers
its last requests soon. With several servers behind one name, the readiness check may reach another server than the
call. So while the model is not ready, only a stream that has started counts as lost, after a long silence. A generating
model may take minutes until its first piece and gets that time after its model was not ready.

A call whose client disconnected is cancelled if the server can cancel safely, and drained otherwise: before release
25.06, a cancellation that meets the answer crashes Triton, or makes it keep the request, and so its model, forever
(server, issue 7368, pull requests 7840, 8078 and 8220). After ABANDONED_TIMEOUT_S it is cancelled in any case, so that
a gateway does not keep the calls of processes that died. From 26.10 on Triton also looks for a cancellation before it
hands a request to its backend (release notes of v2.74.0), so that one in a queue is not run. For streams see
builder.serving.gateway.triton_stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from builder.common.releases import version_tuple
from builder.serving.gateway.errors import queue_full

READY_CHECK_INTERVAL_S = 0.5  # between two readiness checks of a model with pending calls
LOST_AFTER_S = 60.0  # a call is lost if its model was last not ready this long ago, after the call was sent
UNSTARTED_STREAM_LOST_AFTER_S = 300.0  # the same for a stream without output, which may be a complete answer
SILENT_STREAM_LOST_AFTER_S = 60.0  # silence after which a started stream is lost, if its model was not ready meanwhile

IsReady = Callable[[], Awaitable[bool]]
SAFE_CANCEL_VERSION = (2, 59)  # first server version that cancels safely: release 25.06
MAX_ABANDONED_CALLS = 256  # of one model
ABANDONED_TIMEOUT_S = 600.0


class BackendLost(Exception):
    """Triton will not answer a call. Its text, if any, says why."""


class NotReady(NamedTuple):
    """A check that found a model not ready: when it was sent and answered, in monotonic seconds."""

    sent: float
    answered: float


class LossDetector:
    """Detects lost calls. `last_not_ready`: the last check that found each model not ready."""

    def __init__(self) -> None:
        self.last_not_ready: dict[str, NotReady] = {}
        self.checks: dict[str, asyncio.Task[None]] = {}

    async def wait(
        self,
        running: asyncio.Future[Any],
        model: str,
        is_ready: IsReady,
        since: float | None = None,
        has_started: bool = False,
    ) -> None:
        """Wait for a call of `model` that was just sent, or for the next piece of a stream. Raises BackendLost.

        `since`: for a stream, when it last produced a piece or was created; `has_started`: it has produced one.
        Cancelling this leaves `running` alone.
        """
        waiting_since = time.monotonic()
        is_stream = since is not None
        since = waiting_since if since is None else since
        while not (await asyncio.wait({running}, timeout=READY_CHECK_INTERVAL_S))[0]:
            if model not in self.checks:
                self.checks[model] = asyncio.ensure_future(self._check(model, is_ready))
            not_ready, now = self.last_not_ready.get(model), time.monotonic()
            # A check sent before the call tells nothing about it: a busy server may answer the check much later.
            if not_ready is None or not_ready.sent <= since:
                continue
            lost_after_s = UNSTARTED_STREAM_LOST_AFTER_S if is_stream else LOST_AFTER_S
            is_silent = now - waiting_since > SILENT_STREAM_LOST_AFTER_S
            is_lost = is_silent if has_started else now - not_ready.answered > lost_after_s
            if is_lost:
                raise BackendLost

    async def _check(self, model: str, is_ready: IsReady) -> None:
        """Check a model once for all of its calls. No call waits for it: a busy server answers slowly."""
        try:
            sent = time.monotonic()
            if not await is_ready():
                self.last_not_ready[model] = NotReady(sent, time.monotonic())
            await asyncio.sleep(READY_CHECK_INTERVAL_S)
        finally:
            del self.checks[model]


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

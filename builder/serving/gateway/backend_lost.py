"""Detect calls that Triton will never answer: it keeps a model's requests when the model's process dies.

Requests in execute() fail with an error, but requests that a front answers later are dropped silently (python_backend,
src/python_be.cc, ProcessRequests). The only sign is that the model is not ready until its process has been restarted.
An unloaded version is not ready either, but answers its last requests soon. With several servers behind one name, the
readiness check may reach another server than the call. So while the model is not ready, only a stream that has started
counts as lost, after a long silence. A generating model may take minutes until its first piece and gets that time after
its model was not ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

READY_CHECK_INTERVAL_S = 0.5  # between two readiness checks of a model with pending calls
LOST_AFTER_S = 60.0  # a call is lost if its model was last not ready this long ago, after the call was sent
UNSTARTED_STREAM_LOST_AFTER_S = 300.0  # the same for a stream without output, which may be a complete answer
SILENT_STREAM_LOST_AFTER_S = 60.0  # silence after which a started stream is lost, if its model was not ready meanwhile

IsReady = Callable[[], Awaitable[bool]]


class BackendLost(Exception):
    """Triton will not answer a call."""


class LossDetector:
    """Detects lost calls. `last_not_ready`: the time at which each model was last seen not ready."""

    def __init__(self) -> None:
        self.last_not_ready: dict[str, float] = {}
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
            not_ready, now = self.last_not_ready.get(model, since), time.monotonic()
            if not_ready <= since:
                continue
            lost_after_s = UNSTARTED_STREAM_LOST_AFTER_S if is_stream else LOST_AFTER_S
            if now - waiting_since > SILENT_STREAM_LOST_AFTER_S if has_started else now - not_ready > lost_after_s:
                raise BackendLost

    async def _check(self, model: str, is_ready: IsReady) -> None:
        """Check a model once for all of its calls. No call waits for it: a busy server answers slowly."""
        try:
            if not await is_ready():
                self.last_not_ready[model] = time.monotonic()
            await asyncio.sleep(READY_CHECK_INTERVAL_S)
        finally:
            del self.checks[model]

"""Limit the queue of an encoder's front, or of a shared one: how many requests may wait, and for how long.

Triton's own queue has no limit: with one, its batcher stops preparing the next batch (core, src/scheduler_utils.cc,
PriorityQueue: support_prefetching_), and a model of one instance pauses. Triton does not report how many wait either.
So while batches arrive full, the front drains Triton's queue once every DRAIN_INTERVAL_S: it queues as many requests as
may wait, refuses the others, and answers the queued ones from a thread of its own, with a message for each request.
Meanwhile others wait in Triton's queue. Once all queued requests are answered, execute() answers batches directly
again, until it is time to drain again. In a shared front each model has a queue of its own, and the queues take turns:
requests that wait for one model do not count towards another's limit.

Knows queued requests; knows nothing of Triton, texts or engines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAIN_INTERVAL_S = 1.0
SPARSE_FACTOR = 10  # factor for the interval while batches are not full, as where requests cannot share a batch
MAX_DRAIN_S = 0.25  # Triton's metrics do not count the waiting time of queued requests
MAX_GAP_S = 0.005  # a batch that follows the previous one within this time had to wait for it; more may wait
CONNECTION_CHECK_S = 0.5  # check the client of a request that waited this long; a check is a message to the server
FAMILIES = (
    ("refused", "COUNTER", "Requests that were refused because too many waited, or for too long"),
    ("waited_seconds", "COUNTER", "Time that requests waited in the front, after Triton's own queue"),
)


class RequestRefused(RuntimeError):
    """Too many requests wait, or this one has waited for too long."""


@dataclass(frozen=True)
class QueuedRequest:
    """Request that is answered later. `sender` sends its answer; `tensors`: copies of its inputs, by name.

    `model`: in a shared front, the model whose queue it is in.
    """

    sender: Any
    tensors: dict[str, np.ndarray]
    rows: int
    model: str = ""


class RequestQueue:
    """Queue of requests, with a thread that answers them.

    `size`: requests that may wait for one model, 0: any number; `timeout_s`: how long, 0: no limit; `rows`: of a batch,
    at most. `answer` answers the requests of a batch, `refuse` sends a client an error, `is_disconnected` checks
    its connection. `answer` is never called while execute() answers a batch.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float,
        rows: int,
        answer: Callable[[Sequence[QueuedRequest]], None],
        refuse: Callable[[QueuedRequest, BaseException], None],
        is_disconnected: Callable[[QueuedRequest], bool],
    ) -> None:
        self.size, self.timeout_s, self.rows = size, timeout_s, rows
        self.drain_interval_s = min(DRAIN_INTERVAL_S, timeout_s or DRAIN_INTERVAL_S)
        self.answer, self.refuse, self.is_disconnected = answer, refuse, is_disconnected
        self.refused = 0  # requests, so far
        self.waited_s = 0.0  # of all requests together, so far
        self.failure: str | None = None  # why no more requests are queued
        self.queued: dict[str, deque[tuple[float, QueuedRequest]]] = {}  # by model, the next first; with arrival times
        self.changed = threading.Condition()
        self.answering = self.is_stopped = False
        self.drain_started = self.drained_at = self.answered_at = 0.0  # answered_at: the end of the last batch
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def should_queue(self, arrived: float, rows: int) -> bool:
        """Return True if a batch of `rows` is to be queued, not answered at once; `arrived`: from time.monotonic.

        Blocks until all queued requests are answered, or it is time to drain again; not while the front drains.
        """
        with self.changed:
            if not self._is_idle() and self._is_draining(arrived):
                return True
            self.drain_started = arrived
            until_drain = max(0.0, self.drained_at + self.drain_interval_s - arrived)
            answered = self.changed.wait_for(self._is_idle, None if self.failure else until_drain)
            return self.failure is None and (not answered or self._should_drain(arrived, rows))

    def record_answered(self) -> None:
        """Record that execute() answered a batch."""
        self.answered_at = time.monotonic()

    def enqueue(self, arrived: float, requests: Sequence[QueuedRequest]) -> None:
        """Queue the requests of a batch that may wait, and refuse the others. Raises nothing."""
        with self.changed:
            too_many = [request for request in requests if not self._append(arrived, request)]
            self.changed.notify_all()
        for request in too_many:
            of = f" for {request.model}" if request.model else ""
            found = f"{self.size} requests wait already{of} and the limit is {self.size}; send the request again later"
            self._refuse(request, found)
        self.drained_at = self.answered_at = time.monotonic()

    def _append(self, arrived: float, request: QueuedRequest) -> bool:
        """Queue a request; return False if it may not wait."""
        waiting = self.queued.setdefault(request.model, deque())
        if self.size and len(waiting) >= self.size:
            return False
        waiting.append((arrived, request))
        return True

    def values(self) -> dict[str, float]:
        """Return the present value of each family."""
        return {"refused": self.refused, "waited_seconds": self.waited_s}

    def stop(self) -> None:
        """Answer the queued requests, and stop."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()
        self.thread.join()

    def _is_idle(self) -> bool:
        return not self.queued and not self.answering

    def _is_draining(self, arrived: float) -> bool:
        """Return True while the drain that queued the previous batch continues: more may wait behind this one."""
        had_to_wait = arrived - self.answered_at < MAX_GAP_S
        return self.failure is None and had_to_wait and arrived - self.drain_started < MAX_DRAIN_S

    def _should_drain(self, arrived: float, rows: int) -> bool:
        """Return True if it is time to drain, and more may wait behind this batch.

        More may wait if the batch fills more than half of the maximum rows, so that no second one like it fits. More
        may also wait, though rarely many, if the batch arrived before the previous one was answered; this is checked
        less often.
        """
        if not self.size and not self.timeout_s:
            return False
        since = arrived - self.drained_at
        if 2 * rows > self.rows:
            return since > self.drain_interval_s
        return since > SPARSE_FACTOR * self.drain_interval_s and arrived - self.answered_at < MAX_GAP_S

    def _work(self) -> None:
        try:
            while self._answer_next():
                pass
        except BaseException as error:  # otherwise queued requests would get no answer
            self._fail_all(error)

    def _answer_next(self) -> bool:
        """Answer the next batch; return False if there will be no other.

        Keeps no reference to it: before release 24.08 Triton frees a request, and unloads the model, only when its
        sender is gone (python_backend, 373).
        """
        batch = self._next_batch()
        try:
            awaited = [request for arrived, request in batch if self._is_awaited(arrived, request)]
            if awaited:
                self.answer(awaited)
        except BaseException as error:  # a panic of the tokeniser is not an Exception
            for _, request in batch:
                self._send_error(request, error)
        return bool(batch)

    def _next_batch(self) -> list[tuple[float, QueuedRequest]]:
        """Wait for the requests of the next batch; return none once stopped."""
        with self.changed:
            self.answering = False
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.queued or self.is_stopped)
            batch: list[tuple[float, QueuedRequest]] = []
            rows = 0
            while self.queued:
                model, waiting = next(iter(self.queued.items()))
                if batch and rows + waiting[0][1].rows > self.rows:
                    break
                batch.append(waiting.popleft())
                rows += batch[-1][1].rows
                del self.queued[model]
                if waiting:
                    self.queued[model] = waiting  # now last in turn
            self.answering = bool(batch)
            return batch

    def _fail_all(self, error: BaseException) -> None:
        with self.changed:
            self._fail(error)
            requests = [request for waiting in self.queued.values() for _, request in waiting]
            self.queued.clear()
            self.answering = False
            self.changed.notify_all()
        for request in requests:
            self._send_error(request, error)

    def _is_awaited(self, arrived: float, request: QueuedRequest) -> bool:
        """Return True if a request is still to be answered; otherwise send its client an error."""
        waited = time.monotonic() - arrived
        self.waited_s += waited
        if self.timeout_s and waited > self.timeout_s:
            found = f"it waited for {waited:.1f} s, and may for {self.timeout_s:g} s"
            self._refuse(request, f"the request's time was over: {found}")
            return False
        if waited > CONNECTION_CHECK_S and self.is_disconnected(request):
            self._send_error(request, RequestRefused("its client has left"))
            return False
        return True

    def _refuse(self, request: QueuedRequest, why: str) -> None:
        with self.changed:  # both execute() and the thread refuse requests
            self.refused += 1
        self._send_error(request, RequestRefused(why))

    def _send_error(self, request: QueuedRequest, error: BaseException) -> None:
        try:
            self.refuse(request, error)
        except BaseException as unsent:  # the request has no answer, and keeps the model from being unloaded
            self._fail(unsent)

    def _fail(self, error: BaseException) -> None:
        """Queue no more requests. Keeps only the text of the error: the error itself would keep requests alive."""
        self.failure = self.failure or f"{type(error).__name__}: {error}"

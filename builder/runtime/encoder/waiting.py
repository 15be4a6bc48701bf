"""Limit the queue of an encoder's front, or of a shared one: how many requests may wait, and for how long.

Triton's own queue has no limit: with one, its batcher stops preparing the next batch (core, src/scheduler_utils.cc,
PriorityQueue: support_prefetching_), and a model of one instance pauses. Triton does not report how many wait either.
So the front looks, once in LOOK_S while batches come full: it takes the waiting requests out of Triton's queue, keeps
as many as may wait, refuses the others, and answers the kept ones from a thread of its own, with a message for each
request. Meanwhile others wait in Triton's queue. Once all taken requests are answered, execute() answers batches
directly again, until it is time to look again. In a shared front each model has a queue of its own, and they take
turns: requests that wait for one model do not count towards another's limit.

Knows requests that were taken; knows nothing of Triton, texts or engines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LOOK_S = 1.0  # between two looks
RARELY = 10  # factor of LOOK_S while batches are not full: requests with other inputs share none, however many wait
LOOKING_S = 0.25  # longest look: Triton's metrics do not count the waiting time of taken requests
SOON_S = 0.005  # a batch that comes so soon after the one before was there before its turn: more may wait behind it
LONG_S = 0.5  # after so long a client may have disconnected; checking is a message to the server
FAMILIES = (
    ("refused", "COUNTER", "Requests that were refused because too many waited, or for too long"),
    ("waited_seconds", "COUNTER", "Time that requests waited in the front, after Triton's own queue"),
)


class Refused(RuntimeError):
    """The request is not answered: too many wait, or it has waited for too long."""


@dataclass(frozen=True)
class Taken:
    """Request that is answered later. `sender` takes its answer; `tensors`: copies of its inputs, by name.

    `model`: in a shared front, the model whose queue it is in.
    """

    sender: Any
    tensors: dict[str, np.ndarray]
    rows: int
    model: str = ""


class Waiting:
    """Queue of taken requests, with a thread that answers them.

    `size`: requests that may wait for one model, 0: any number; `timeout_s`: how long, 0: no limit; `rows`: of a batch,
    at most. `answer` answers the requests of a batch, `refuse` tells a client why its request is not answered, `left`
    returns True if the client disconnected. `answer` is never called while execute() answers a batch.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float,
        rows: int,
        answer: Callable[[Sequence[Taken]], None],
        refuse: Callable[[Taken, BaseException], None],
        left: Callable[[Taken], bool],
    ) -> None:
        self.size, self.timeout_s, self.rows = size, timeout_s, rows
        self.look_s = min(LOOK_S, timeout_s or LOOK_S)
        self.answer, self.refuse, self.left = answer, refuse, left
        self.refused = 0  # requests, so far
        self.waited_s = 0.0  # of all requests together, so far
        self.failure: str | None = None  # why no more requests are taken
        self.taken: dict[str, deque[tuple[float, Taken]]] = {}  # by model, the next first; with arrival times
        self.changed = threading.Condition()
        self.answering = self.stopped = False
        self.began = self.looked = self.returned = 0.0  # start of the last look, its end, and the end of the last batch
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def takes(self, came: float, rows: int) -> bool:
        """Return True if a batch of `rows` that came at `came` (time.monotonic) is to be taken, not answered at once.

        Returns when it is the batch's turn: at once while the front looks, otherwise when all taken requests are
        answered, or when it is time to look again.
        """
        with self.changed:
            if not self._idle() and self._goes_on(came):
                return True
            self.began = came
            answered = self.changed.wait_for(self._idle, None if self.failure else self._until_next_look(came))
            return self.failure is None and (not answered or self._begins(came, rows))

    def answered(self) -> None:
        """Record that execute() answered a batch: it is now the next one's turn."""
        self.returned = time.monotonic()

    def take(self, came: float, requests: Sequence[Taken]) -> None:
        """Keep the requests of a batch that may wait, and refuse the others. Raises nothing."""
        with self.changed:
            too_many = [request for request in requests if not self._keeps(came, request)]
            self.changed.notify_all()
        for request in too_many:
            of = f" for {request.model}" if request.model else ""
            found = f"{self.size} requests wait already{of} and the limit is {self.size}; send the request again later"
            self._refuse(request, found)
        self.looked = self.returned = time.monotonic()

    def _keeps(self, came: float, request: Taken) -> bool:
        """Queue a request; return False if it may not wait."""
        waiting = self.taken.setdefault(request.model, deque())
        if self.size and len(waiting) >= self.size:
            return False
        waiting.append((came, request))
        return True

    def values(self) -> dict[str, float]:
        """Return the present value of each family."""
        return {"refused": self.refused, "waited_seconds": self.waited_s}

    def stop(self) -> None:
        """Answer the taken requests, and stop."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        self.thread.join()

    def _idle(self) -> bool:
        return not self.taken and not self.answering

    def _goes_on(self, came: float) -> bool:
        """Return True while the look that took the batch before goes on: more may wait behind this one."""
        return self.failure is None and came - self.returned < SOON_S and came - self.began < LOOKING_S

    def _begins(self, came: float, rows: int) -> bool:
        """Return True if it is time to look, and more may wait behind this batch.

        More may wait if the batch fills more than half of the rows that a batch may have, so that another like it does
        not fit; or if it was there before its turn, which seldom means that many wait.
        """
        if not self.size and not self.timeout_s:
            return False
        full, since = 2 * rows > self.rows, came - self.looked
        return since > self.look_s if full else since > RARELY * self.look_s and came - self.returned < SOON_S

    def _until_next_look(self, came: float) -> float:
        return max(0.0, self.looked + self.look_s - came)

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # otherwise waiting requests would get no answer
            self._end(error)

    def _turn(self) -> bool:
        """Answer the next batch; return False if there will be no other.

        Keeps no reference to it: before release 24.08 Triton frees a request, and unloads the model, only when its
        sender is gone (python_backend, 373).
        """
        batch = self._next()
        try:
            wanted = [request for came, request in batch if self._waits(came, request)]
            if wanted:
                self.answer(wanted)
        except BaseException as error:  # a panic of the tokeniser is not an Exception
            for _, request in batch:
                self._tell(request, error)
        return bool(batch)

    def _next(self) -> list[tuple[float, Taken]]:
        """Wait for the requests of the next batch; return none if there will be no others."""
        with self.changed:
            self.answering = False
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.taken or self.stopped)
            batch: list[tuple[float, Taken]] = []
            rows = 0
            while self.taken:
                model, waiting = next(iter(self.taken.items()))
                if batch and rows + waiting[0][1].rows > self.rows:
                    break
                batch.append(waiting.popleft())
                rows += batch[-1][1].rows
                del self.taken[model]
                if waiting:
                    self.taken[model] = waiting  # now last in turn
            self.answering = bool(batch)
            return batch

    def _end(self, error: BaseException) -> None:
        with self.changed:
            self._fail(error)
            left = [request for waiting in self.taken.values() for _, request in waiting]
            self.taken.clear()
            self.answering = False
            self.changed.notify_all()
        for request in left:
            self._tell(request, error)

    def _waits(self, came: float, request: Taken) -> bool:
        """Return True if a request is still to be answered; otherwise tell its client."""
        waited = time.monotonic() - came
        self.waited_s += waited
        if self.timeout_s and waited > self.timeout_s:
            found = f"it waited for {waited:.1f} s, and may for {self.timeout_s:g} s"
            self._refuse(request, f"the request's time was over: {found}")
            return False
        if waited > LONG_S and self.left(request):
            self._tell(request, Refused("its client has left"))
            return False
        return True

    def _refuse(self, request: Taken, why: str) -> None:
        with self.changed:  # both execute() and the thread refuse requests
            self.refused += 1
        self._tell(request, Refused(why))

    def _tell(self, request: Taken, error: BaseException) -> None:
        try:
            self.refuse(request, error)
        except BaseException as untold:  # the request has no answer, and keeps the model from being unloaded
            self._fail(untold)

    def _fail(self, error: BaseException) -> None:
        """Take no more requests. Keeps only the text of the error: the error itself would keep requests alive."""
        self.failure = self.failure or f"{type(error).__name__}: {error}"

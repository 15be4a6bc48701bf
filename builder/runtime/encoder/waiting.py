"""The queue of an encoder's front: how many requests may wait for their turn, and for how long.

Triton's own queue has no limit: with one, its batcher stops preparing the next batch (core, src/scheduler_utils.cc,
PriorityQueue: support_prefetching_), and a model of one instance pauses. Nor does it say how many wait. So, while
requests come as fast as they are answered, the front looks once in LOOK_S: it takes all that wait out of Triton's queue
at once, keeps as many as may wait, refuses the others, and answers what it keeps from a thread of its own. All other
batches are answered where they came, as if this were not there: an answer by a sender is a message for each request.

Knows jobs; knows nothing of Triton, texts or engines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LOOK_S = 1.0
RARELY = 10  # times that, while batches are not full: requests with other inputs share none, however many wait
SOON_S = 0.005  # a batch that comes so soon after the one before has waited for it, and others may wait behind it
LONG_S = 0.5  # who has waited so long may have left; the question is a message to the server


class Refused(RuntimeError):
    """The request is not answered: too many wait, or it has waited for too long."""


@dataclass(frozen=True)
class Job:
    """A request that is answered later. `sender`: what takes its answer; `tensors`: copies of its inputs, by name."""

    sender: Any
    tensors: dict[str, np.ndarray]
    rows: int


class Waiting:
    """`size`: requests that may wait, 0: any number; `timeout_s`: how long, 0: for ever; `rows`: of a batch, at most.

    `answer` answers the jobs of a batch, `refuse` tells one why it is not answered, `left` is whether nobody waits for
    it any more.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float,
        rows: int,
        answer: Callable[[Sequence[Job]], None],
        refuse: Callable[[Job, Exception], None],
        left: Callable[[Job], bool],
    ) -> None:
        self.size, self.timeout_s, self.rows = size, timeout_s, rows
        self.look_s = min(LOOK_S, timeout_s or LOOK_S)
        self.answer, self.refuse, self.left = answer, refuse, left
        self.refused = 0  # so far
        self.jobs: deque[tuple[float, Job]] = deque()  # with when they were taken
        self.changed = threading.Condition()
        self.answering = self.stopped = False
        self.looked = self.returned = 0.0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def takes(self, came: float, rows: int) -> bool:
        """Whether a batch of `rows` that came at `came` (time.monotonic) is to be taken, and not answered at once."""
        with self.changed:
            if self.jobs or self.answering:
                return True
        if not self.size and not self.timeout_s:
            return False
        after = self.look_s if self._full(rows) else RARELY * self.look_s
        return came - self.looked > after and self._more(came, rows)

    def done(self) -> None:
        """A batch was answered where it came: from now on it is the next one's turn."""
        self.returned = time.monotonic()

    def take(self, came: float, jobs: Sequence[Job]) -> None:
        """Keep the jobs of a batch that may wait, and refuse the others.

        Returns when Triton may hand over the next batch: at once where it has one, otherwise when all are answered or
        it is time to look again.
        """
        more = self._more(came, sum(job.rows for job in jobs))
        with self.changed:
            room = max(0, self.size - len(self.jobs)) if self.size else len(jobs)
            self.jobs.extend((came, job) for job in jobs[:room])
            self.changed.notify_all()
        for job in jobs[room:]:
            reason = f"{self.size} requests wait already and the limit is {self.size}"
            self._refuse(job, f"{reason}; send the request again later")
        if not more:
            with self.changed:
                self.changed.wait_for(lambda: not self.jobs and not self.answering, self.look_s)
        self.looked = self.returned = time.monotonic()

    def stop(self) -> None:
        """Answer what was taken, and end."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        self.thread.join()

    def _more(self, came: float, rows: int) -> bool:
        """Whether requests may wait behind a batch: it was there before its turn, or no two of its size make one."""
        return came - self.returned < SOON_S or self._full(rows)

    def _full(self, rows: int) -> bool:
        """Whether another request as large has no room in a batch: where it has, Triton's queue was nearly empty."""
        return 2 * rows > self.rows

    def _work(self) -> None:
        while True:
            with self.changed:
                self.answering = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.jobs or self.stopped)
                if not self.jobs:
                    return
                self.answering = True
                batch = self._next()
            wanted = [job for came, job in batch if self._waits(came, job)]
            if wanted:
                self._answer(wanted)

    def _answer(self, jobs: Sequence[Job]) -> None:
        try:
            self.answer(jobs)
        except Exception as error:  # or nobody would answer the jobs that come after
            for job in jobs:
                self.refuse(job, error)

    def _next(self) -> list[tuple[float, Job]]:
        batch = [self.jobs.popleft()]
        rows = batch[0][1].rows
        while self.jobs and rows + self.jobs[0][1].rows <= self.rows:
            batch.append(self.jobs.popleft())
            rows += batch[-1][1].rows
        return batch

    def _waits(self, came: float, job: Job) -> bool:
        """Whether a job is still to be answered; it is told where it is not."""
        waited = time.monotonic() - came
        if self.timeout_s and waited > self.timeout_s:
            reason = f"it waited for {waited:.1f} s, and may for {self.timeout_s:g} s"
            self._refuse(job, f"the request's time was over: {reason}")
            return False
        if waited > LONG_S and self.left(job):
            self._refuse(job, "its client has left")
            return False
        return True

    def _refuse(self, job: Job, why: str) -> None:
        self.refused += 1
        self.refuse(job, Refused(why))

"""The queue of an encoder's front: what is taken, kept, refused and dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from builder.runtime.encoder import waiting
from builder.runtime.encoder.waiting import Job, Refused, Waiting

PATIENCE_S = 30.0


class FakeFront:
    """Answers batches one by one as it is let; jobs are known by their `sender`, a name."""

    def __init__(self, size: int, timeout_s: float = 0.0, fails: bool = False) -> None:
        self.batches: list[list[str]] = []
        self.refused: dict[str, str] = {}
        self.fails, self.gone = fails, set[str]()
        self.asked, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.queue = Waiting(size, timeout_s, 4, self.answer, self.refuse, lambda job: job.sender in self.gone)

    def answer(self, jobs: Sequence[Job]) -> None:
        self.batches.append([job.sender for job in jobs])
        self.asked.release()
        assert self.let.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise ValueError("no such tensor")

    def refuse(self, job: Job, error: Exception) -> None:
        self.refused[job.sender] = f"{type(error).__name__}: {error}"

    def take(self, names: str, rows: int = 1, came: float = 0.0) -> None:
        """As if they had been there before their turn."""
        tensors = {"text_input": np.zeros((rows, 1))}
        self.queue.take(came, [Job(name, tensors, rows) for name in names])

    def finish(self) -> None:
        self.let.release(100)
        self.queue.stop()


@pytest.fixture
def fronts() -> Iterator[list[FakeFront]]:
    made: list[FakeFront] = []
    yield made
    for front in made:
        front.finish()


def test_batches_are_answered_where_they_came_while_no_others_wait(fronts: list[FakeFront]) -> None:
    fronts.append(FakeFront(8))
    queue = fronts[0].queue
    assert not queue.takes(100.0, 1), "nothing came before it"
    assert queue.takes(100.0, 3), "another of three rows would not have fitted into its batch"
    queue.returned = 100.0
    assert queue.takes(100.001, 1), "it was there when the one before was answered"
    assert not queue.takes(100.1, 1)
    queue.looked = 100.0
    assert not queue.takes(100.001, 1), "somebody looked a moment ago"
    assert queue.takes(102.001, 3)
    queue.returned = 102.0
    assert not queue.takes(102.001, 1), "a batch that is not full leaves few in Triton's queue"


def test_a_queue_without_limits_is_triton_s(fronts: list[FakeFront]) -> None:
    fronts.append(FakeFront(0))
    assert not fronts[0].queue.takes(100.0, 4)


def test_as_many_as_may_wait_and_the_others_are_refused(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(5))
    front.take("a")
    assert front.asked.acquire(timeout=PATIENCE_S)
    front.take("bcdefghi")
    message = "Refused: 5 requests wait already and the limit is 5; send the request again later"
    assert front.refused == dict.fromkeys("ghi", message)
    assert front.queue.takes(0.0, 1), "who comes later must not be answered before those that wait"
    front.finish()
    assert front.batches == [["a"], ["b", "c", "d", "e"], ["f"]], "in order, at most four rows"
    assert front.queue.refused == 3


def test_a_batch_has_no_more_rows_than_a_call_takes(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(9))
    front.take("abc", rows=3)
    front.finish()
    assert front.batches == [["a"], ["b"], ["c"]]


def test_who_has_waited_too_long_or_has_left_never_reaches_the_engine(
    fronts: list[FakeFront], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LONG_S", 0.0)
    fronts.append(front := FakeFront(0, timeout_s=60))
    front.gone.add("c")
    now = time.monotonic()
    front.take("a", came=now - 100)
    front.take("bcd", came=now - 1)
    front.finish()
    assert sorted(name for batch in front.batches for name in batch) == ["b", "d"]
    assert "time was over: it waited for 100" in front.refused["a"], "what the gateway knows a 504 by"
    assert "left" in front.refused["c"]


def test_triton_hands_over_the_next_batch_when_all_are_answered(fronts: list[FakeFront]) -> None:
    """One that came by itself has nobody behind it; what comes meanwhile makes a batch in Triton."""
    fronts.append(front := FakeFront(8))
    front.queue.look_s = PATIENCE_S
    returned = threading.Event()

    def execute() -> None:
        front.take("a", came=time.monotonic() + 1000)
        returned.set()

    threading.Thread(target=execute, daemon=True).start()
    assert front.asked.acquire(timeout=PATIENCE_S)
    assert not returned.is_set()
    front.let.release()
    assert returned.wait(PATIENCE_S)
    assert not front.queue.jobs


def test_a_failure_is_told_to_all_that_it_concerns_and_ends_nothing(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(8, fails=True))
    front.let.release(2)
    front.take("ab")
    front.take("cd")
    front.finish()
    assert front.refused == dict.fromkeys("abcd", "ValueError: no such tensor")
    assert issubclass(Refused, RuntimeError)

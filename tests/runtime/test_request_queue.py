"""The queue of an encoder's front: requests are accepted, queued, refused and dropped."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from builder.runtime.encoder import request_queue
from builder.runtime.encoder.request_queue import MAX_DRAIN_S, QueuedRequest, RequestQueue, RequestRefused

PATIENCE_S = 300.0


class FakeFront:
    """Front that answers one batch at a time when a test allows it; a request's `sender` is its name."""

    def __init__(self, size: int, timeout_s: float = 0.0) -> None:
        self.batches: list[list[str]] = []
        self.refused: dict[str, str] = {}
        self.fails: BaseException | None = None
        self.gone, self.deaf = set[str](), set[str]()
        self.asked, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.queue = RequestQueue(size, timeout_s, 4, self.answer, self.refuse, self.left)

    def answer(self, taken: Sequence[QueuedRequest]) -> None:
        self.batches.append([request.sender for request in taken])
        self.asked.release()
        assert self.let.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise type(self.fails)(*self.fails.args)

    def refuse(self, request: QueuedRequest, error: BaseException) -> None:
        if request.sender in self.deaf:
            raise BrokenPipeError(request.sender)
        self.refused[request.sender] = f"{type(error).__name__}: {error}"

    def left(self, request: QueuedRequest) -> bool:
        if request.sender in self.deaf:
            raise BrokenPipeError(request.sender)
        return request.sender in self.gone

    def take(self, names: str, rows: int = 1, came: float = 0.0, by_name: bool = False) -> None:
        """Accept requests with these names; `by_name`: each is for the model of that name."""
        tensors = {"text_input": np.zeros((rows, 1))}
        self.queue.enqueue(came, [QueuedRequest(name, tensors, rows, name if by_name else "") for name in names])

    def begin(self, names: str) -> None:
        """Accept requests, and start to answer the first batch of them."""
        self.take(names, came=time.monotonic())
        assert self.asked.acquire(timeout=PATIENCE_S)

    def answered(self) -> None:
        """Wait until all accepted requests are answered."""
        with self.queue.changed:
            assert self.queue.changed.wait_for(self.queue._is_idle, PATIENCE_S)

    def finish(self) -> None:
        self.let.release(100)
        self.queue.stop()


class Panic(BaseException):
    """Error that a tokeniser's Rust raises when it panics."""


@pytest.fixture
def fronts() -> Iterator[list[FakeFront]]:
    made: list[FakeFront] = []
    yield made
    for front in made:
        front.finish()


def test_request_queue_leaves_batches_to_execute_while_none_wait(fronts: list[FakeFront]) -> None:
    fronts.append(FakeFront(8))
    queue = fronts[0].queue
    assert not queue.should_queue(100.0, 1), "nothing came before it"
    assert queue.should_queue(100.0, 3), "another of three rows would not have fitted into its batch"
    queue.answered_at = 100.0
    assert queue.should_queue(100.001, 1), "it was there when the one before was answered"
    assert not queue.should_queue(100.1, 1)
    queue.drained_at = 100.0
    assert not queue.should_queue(100.001, 1), "the last drain was a moment ago"
    assert queue.should_queue(102.001, 3)
    queue.answered_at = 102.0
    assert not queue.should_queue(102.001, 1), "a batch that is not full leaves few in Triton's queue"


def test_request_queue_without_limits_never_drains(fronts: list[FakeFront]) -> None:
    fronts.append(FakeFront(0))
    assert not fronts[0].queue.should_queue(100.0, 4)


def test_request_queue_refuses_requests_beyond_its_size(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(5))
    front.begin("a")
    front.take("bcdefghi")
    message = "RequestRefused: 5 requests wait already and the limit is 5; send the request again later"
    assert front.refused == dict.fromkeys("ghi", message)
    front.finish()
    assert front.batches == [["a"], ["b", "c", "d", "e"], ["f"]], "in order, at most four rows"
    assert front.queue.refused == 3


def test_request_queue_alternates_between_hosted_models(fronts: list[FakeFront]) -> None:
    """Requests to two models, A and B; batches have up to four rows, and the limit of five applies per model."""
    fronts.append(front := FakeFront(5))
    front.take("A", by_name=True)
    assert front.asked.acquire(timeout=PATIENCE_S)
    front.take("AAAAAAABBA", by_name=True)
    front.finish()
    assert front.batches == [["A"], ["A", "B", "A", "B"], ["A", "A", "A"]]
    message = "RequestRefused: 5 requests wait already for A and the limit is 5; send the request again later"
    assert front.refused == {"A": message}
    assert front.queue.refused == 3


def test_request_queue_drains_while_more_batches_wait(fronts: list[FakeFront]) -> None:
    """Draining ends even under steady load, because Triton's statistics do not change until then."""
    fronts.append(front := FakeFront(8))
    front.begin("a")
    queue = front.queue
    queue.drain_started = queue.drained_at = queue.answered_at = 100.0
    assert queue.should_queue(100.001, 1)
    assert not queue._is_draining(100.1), "it came by itself"
    queue.drained_at = queue.answered_at = 100.0 + MAX_DRAIN_S
    assert not queue._is_draining(100.001 + MAX_DRAIN_S)


def test_request_queue_lets_later_batches_wait_in_triton(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(8))
    queue, taken = front.queue, list[bool]()
    queue.drain_interval_s = PATIENCE_S
    front.begin("abcdef")
    came = queue.answered_at + 1  # no request waited behind the accepted ones
    thread = threading.Thread(target=lambda: taken.append(queue.should_queue(came, 4)))
    thread.start()
    front.let.release()
    assert front.asked.acquire(timeout=PATIENCE_S)
    assert thread.is_alive(), "e and f were before it"
    front.let.release()
    thread.join(PATIENCE_S)
    assert taken == [False], "all are answered, and it is not yet time to look again"


def test_request_queue_drains_again_while_requests_are_queued(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(8))
    front.begin("ab")
    assert front.queue.should_queue(front.queue.drained_at + request_queue.DRAIN_INTERVAL_S, 1)


def test_request_queue_limits_the_rows_of_a_batch(fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(9))
    front.take("abc", rows=3)
    front.take("de", rows=0)
    front.finish()
    assert front.batches[:2] == [["a"], ["b"]]
    assert sorted(name for batch in front.batches for name in batch) == list("abcde"), "those without rows too"


def test_request_queue_drops_late_and_disconnected_requests(
    fronts: list[FakeFront], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "CONNECTION_CHECK_S", 0.0)
    fronts.append(front := FakeFront(0, timeout_s=900))
    front.gone.add("c")
    now = time.monotonic()
    front.take("a", came=now - 1000)
    front.take("bcd", came=now - 1)
    front.finish()
    assert sorted(name for batch in front.batches for name in batch) == ["b", "d"]
    assert "time was over: it waited for 1" in front.refused["a"], "what the gateway knows a 504 by"
    assert "left" in front.refused["c"]
    assert front.queue.refused == 1, "who left was not refused"
    assert front.queue.waited_s >= 1003, "what Triton's own figures do not have"


@pytest.mark.parametrize("error", [ValueError("no such tensor"), Panic("index out of bounds")])
def test_request_queue_goes_on_after_a_failed_batch(error: BaseException, fronts: list[FakeFront]) -> None:
    fronts.append(front := FakeFront(8))
    front.fails = error
    front.let.release(2)
    front.take("abcd")
    front.take("ef")
    front.finish()
    assert front.refused == dict.fromkeys("abcdef", f"{type(error).__name__}: {error}")
    assert front.queue.failure is None
    assert issubclass(RequestRefused, RuntimeError)


def test_request_queue_stops_queueing_after_an_error_was_not_sent(
    fronts: list[FakeFront], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender fails at the check for a disconnected client, and again when the error is sent."""
    monkeypatch.setattr(request_queue, "CONNECTION_CHECK_S", 0.0)
    fronts.append(front := FakeFront(0, timeout_s=900))
    front.deaf.add("b")
    front.let.release(100)
    front.take("abcd", came=time.monotonic() - 1)
    front.take("e", came=time.monotonic() - 1)
    front.answered()
    assert not front.queue.should_queue(time.monotonic() + 100, 4), "answered where it came"
    assert front.refused == dict.fromkeys("acd", "BrokenPipeError: b")
    assert front.batches == [["e"]]
    assert front.queue.failure == "BrokenPipeError: b"


def test_request_queue_fails_all_requests_if_its_thread_ends(
    fronts: list[FakeFront], monkeypatch: pytest.MonkeyPatch
) -> None:
    fronts.append(front := FakeFront(8))
    front.begin("abcdef")
    monkeypatch.setattr(front.queue, "_next_batch", lambda: [][0])
    front.let.release()
    front.queue.thread.join(PATIENCE_S)
    assert front.refused == dict.fromkeys("ef", "IndexError: list index out of range")
    assert front.queue.failure
    assert not front.queue.should_queue(time.monotonic() + 100, 4)


def test_request_queue_keeps_no_reference_to_an_answered_request(fronts: list[FakeFront]) -> None:
    """Before release 24.08, Triton frees a request only with its sender."""
    fronts.append(front := FakeFront(8))
    front.let.release(100)
    front.fails = ValueError("too long")
    request = QueuedRequest("a", {}, 1)
    known = weakref.ref(request)
    front.queue.enqueue(time.monotonic(), [request])
    del request
    front.answered()
    gc.collect()
    assert known() is None

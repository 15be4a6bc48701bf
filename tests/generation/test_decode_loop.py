"""The decode loop over an executor whose answers depend on every position of the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from builder.runtime.generation import sampling
from builder.runtime.generation.beams import BeamSearch
from builder.runtime.generation.calls import join_prefills
from builder.runtime.generation.decode_loop import DecodeLoop, DecodeLoopFailed
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.scheduler import DeadlineExceeded, QueueFull, SchedulerLimits
from builder.runtime.generation.sequences import AnswerPiece, BeamSequence, Request
from builder.runtime.generation.slot_cache import SlotCache
from builder.runtime.panics import TokenizerError
from tests.generation.asked import Asked, Letters
from tests.generation.executors import JoiningSumExecutor, SumExecutor, expected


class FailingExecutor(SumExecutor):
    """Executor with one slot that raises `error` in every step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(slots=1)
        self.error = error

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
        raise self.error


def loop_of(
    executor: SumExecutor, queue: int = 100, prefill: int = 4, reuse: bool = True, wait_s: float = 0
) -> DecodeLoop:
    return DecodeLoop(executor, SchedulerLimits(queue, prefill, wait_s), reuse)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(("kind", "prefill"), [(SumExecutor, 4), (JoiningSumExecutor, 40)])
def test_decode_loop_answers_a_batch_as_each_prompt_alone(
    kind: type[SumExecutor], prefill: int, slots: int, reuse: bool
) -> None:
    """40 requests of unequal length with common prefixes arrive while others run in few slots."""
    generator = np.random.default_rng(1)
    executor = kind(slots)
    loop = loop_of(executor, prefill=prefill, reuse=reuse)
    begin = generator.integers(0, 50, 6).tolist()
    requests = []
    for number in range(40):
        own = generator.integers(0, 50, int(generator.integers(1, 12))).tolist()
        prompt = [*begin, *own] if number % 3 else own
        requests.append(Asked(prompt, int(generator.integers(1, 12))))
        loop.submit(requests[-1].sequences)
        for _ in range(int(generator.integers(0, 4))):
            loop.step()
    loop.run_until_idle()
    for one in requests:
        assert one.tokens == expected(one.request.prompt, one.request.max_tokens)
        assert one.pieces[-1].finish_reason == "length"
        assert [bool(piece.finish_reason) for piece in one.pieces].count(True) == 1
        assert not one.errors
    assert loop.cache.free_slots == slots
    assert (loop.stats.reused_tokens > 0) == reuse


def test_decode_loop_fills_a_freed_slot_in_the_next_step() -> None:
    executor = SumExecutor(slots=2)
    loop = loop_of(executor, prefill=100)
    first, second, third = Asked([1, 2], 2), Asked([3], 9), Asked([4], 3)
    for one in (first, second, third):
        loop.submit(one.sequences)
    loop.step()  # prefill of two, then one token of each: the first is done
    assert first.pieces[-1].finish_reason
    assert executor.calls[-1] == (0, 2, 1)
    loop.step()
    assert third.tokens, "the third runs in the step after the first ended"
    assert executor.calls[-1] == (0, 2, 1)


def test_decode_loop_joins_prefills_of_adjacent_slots() -> None:
    """Prefills join up to the token limit of a step including padding; chunked and scored prompts run alone."""
    executor = JoiningSumExecutor(slots=8, max_length=64)
    loop = loop_of(executor, prefill=24)
    requests = [Asked(list(range(1, length + 1)), 5) for length in (3, 5, 4, 2, 9)]
    for one in requests:
        loop.submit(one.sequences)
    loop.step()
    assert executor.calls == [(0, 4, 5), (4, 1, 9), (0, 5, 1)]
    loop.run_until_idle()
    assert [one.tokens for one in requests] == [expected(one.request.prompt, 5) for one in requests]
    executor.calls.clear()
    again, other = Asked([1, 2, 3, 4, 5, 6], 2), Asked([7, 8, 9], 2)
    for one in (again, other):
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert all(rows == 1 for _, rows, new in executor.calls if new > 1), "one of the two goes on from what a slot held"
    assert [one.tokens for one in (again, other)] == [expected(one.request.prompt, 2) for one in (again, other)]


def test_joined_prefill_is_at_most_half_padding() -> None:
    """Regression: rows were padded to the longest, and a step exceeded its limit of tokens several times."""
    executor = JoiningSumExecutor(slots=4, max_length=64)
    loop = loop_of(executor, prefill=40)
    requests = [Asked(list(range(1, length + 1)), 2) for length in (1, 1, 12, 12)]
    for one in requests:
        loop.submit(one.sequences)
    loop.step()
    assert executor.calls == [(0, 2, 1), (2, 2, 12), (0, 4, 1)]
    loop.run_until_idle()
    assert [one.tokens for one in requests] == [expected(one.request.prompt, 2) for one in requests]


def test_joined_prefills_keep_the_order_of_arrival() -> None:
    """Regression: they ran in the order of the free slots."""
    executor = JoiningSumExecutor(slots=4, max_length=64)
    cache = SlotCache(4, 64, executor.copy)
    requests = [Asked(list(range(1, length + 1)), 2) for length in (9, 3, 3)]
    sequences = [one.sequences[0] for one in requests]
    for sequence, slot in zip(sequences, (3, 1, 0), strict=True):
        sequence.slots = [slot]
    groups = join_prefills(cache, [(sequence, sequence.tokens) for sequence in sequences], 20)
    assert [[one.slots[0] for one, _ in group] for group in groups] == [[3], [0, 1]]


def test_decode_loop_decodes_while_a_long_prompt_prefills() -> None:
    executor = SumExecutor(slots=2, max_length=200)
    loop = loop_of(executor, prefill=10)
    short, long = Asked([1], 50), Asked(list(range(40)) * 3, 2)
    loop.submit(short.sequences)
    loop.step()
    loop.submit(long.sequences)
    before = len(short.tokens)
    for _ in range(6):
        loop.step()
    assert len(short.tokens) == before + 6, "a token a step while the long prompt is read"
    assert not long.tokens
    assert max(new for _, _, new in executor.calls) == 10
    loop.run_until_idle()
    assert long.tokens == expected(long.request.prompt, 2)


def test_scheduler_orders_by_priority_then_arrival() -> None:
    loop = loop_of(SumExecutor(slots=1))
    order: list[str] = []

    def note(name: str, piece: AnswerPiece) -> None:
        order.append(name)

    for name, priority in (("first", 1), ("second", 1), ("urgent", 0), ("later", 5)):
        one = Asked([1, 2], 1, priority=priority)
        one.request.emit = partial(note, name)
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert order == ["urgent", "first", "second", "later"]


def test_cancelled_request_frees_its_slot_within_a_step() -> None:
    loop = loop_of(SumExecutor(slots=1))
    gone, waiting = Asked([1], 30), Asked([2], 3)
    loop.submit(gone.sequences)
    loop.submit(waiting.sequences)
    loop.step()
    gone.request.cancel()
    loop.step()
    assert waiting.tokens
    count = len(gone.pieces)
    loop.run_until_idle()
    assert len(gone.pieces) == count
    assert waiting.tokens == expected([2], 3)


def test_deadlines_end_waiting_and_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, later = loop_of(SumExecutor(slots=1)), time.monotonic() + 3600
    running = Asked([1], 30, deadline=later - 1)
    waiting = Asked([2], 3, deadline=time.monotonic() - 1)
    loop.submit(running.sequences)
    loop.submit(waiting.sequences)
    loop.step()
    assert isinstance(waiting.errors[0], DeadlineExceeded)
    assert running.tokens
    assert not running.errors
    monkeypatch.setattr(time, "monotonic", lambda: later)
    loop.step()
    assert isinstance(running.errors[0], DeadlineExceeded)
    assert len(running.errors) == len(waiting.errors) == 1
    assert loop.cache.free_slots == 1


def test_scheduler_refuses_sequences_beyond_its_queue() -> None:
    loop = loop_of(SumExecutor(slots=1), queue=2)
    for _ in range(2):
        loop.submit(Asked([1], 2).sequences)
    with pytest.raises(QueueFull, match="2 sequences wait already and the limit is 2"):
        loop.submit(Asked([1], 2).sequences)


def test_scheduler_refuses_requests_that_wait_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, later = loop_of(SumExecutor(slots=1), wait_s=600), time.monotonic() + 3600
    running, waiting = Asked([1], 20, n=2, temperature=1.0), Asked([2], 20)
    loop.submit(running.sequences)  # the second of its two waits for the slot of the first
    loop.submit(waiting.sequences)
    loop.step()
    assert not waiting.errors
    monkeypatch.setattr(time, "monotonic", lambda: later)
    loop.step()
    assert isinstance(waiting.errors[0], DeadlineExceeded)
    assert str(waiting.errors[0]) == "the request waited 600 s and its turn did not come; send it again later"
    loop.run_until_idle()
    assert not running.errors
    assert [piece.finish_reason for piece in running.pieces].count("length") == 2


def test_scheduler_queue_can_be_unlimited() -> None:
    loop = loop_of(SumExecutor(slots=1), queue=0)
    for _ in range(600):
        loop.submit(Asked([1], 1).sequences)
    loop.run_until_idle()
    assert loop.stats.failures == 0


@pytest.mark.parametrize("beams", [1, 2])
def test_detokeniser_error_fails_only_its_request(beams: int) -> None:
    loop = loop_of(SumExecutor(slots=4))
    broken, other = Asked([1], 4), Asked([2], 6)

    class Broken(Letters):
        def push(self, token: int) -> str:
            raise TokenizerError("index out of bounds")

    if beams > 1:
        search = BeamSearch(Rules(RequestOptions(num_beams=2, temperature=0.0), max_tokens=4), [1], frozenset())
        loop.submit([BeamSequence(broken.request, search, Broken)])
    else:
        broken.sequences[0].detokenizer = Broken()
        loop.submit(broken.sequences)
    loop.submit(other.sequences)
    loop.run_until_idle()
    assert [str(error) for error in broken.errors] == ["index out of bounds"]
    assert other.tokens == expected([2], 6)
    assert loop.cache.free_slots == 4


def test_cancelled_request_gets_no_more_text() -> None:
    loop, later = loop_of(SumExecutor(slots=1)), list[Callable[[], None]]()
    one = Asked([1], 2)
    one.request.defer = later.append
    loop.submit(one.sequences)
    loop.run_until_idle()
    later.pop(0)()
    assert len(one.pieces) == 1
    one.request.cancel()
    for work in later:
        work()
    assert len(one.pieces) == 1


def test_request_gets_one_error_from_two_threads() -> None:
    """The writer thread fails answers that it cannot write, and the loop refuses late requests."""
    both = threading.Barrier(2)

    class Watched(Request):
        @property
        def active(self) -> bool:
            was = super().active
            with suppress(threading.BrokenBarrierError):  # the other waits for its turn
                both.wait(0.05)
            return was

    errors: list[Exception] = []
    request = Watched([1], RequestOptions(), 1, lambda piece: None, errors.append)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(request.refuse, (ValueError("a"), ValueError("b"))))
    assert sorted(ended) == [False, True]
    assert len(errors) == 1


def test_decode_loop_fails_after_a_panic() -> None:
    class PanicError(BaseException):
        pass

    loop = loop_of(FailingExecutor(PanicError("unwrap on None")))
    one = Asked([1], 5)
    loop.submit(one.sequences)
    loop.start()
    deadline = time.monotonic() + 300
    while not one.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(one.errors[0], DecodeLoopFailed)
    assert loop.stats.healthy == 0


def test_failed_step_fails_all_present_and_later_requests() -> None:
    loop = loop_of(FailingExecutor(ZeroDivisionError("division by zero")))
    running, waiting = Asked([1], 5), Asked([2], 5)
    loop.submit(running.sequences)
    loop.submit(waiting.sequences)
    loop.start()
    deadline = time.monotonic() + 300
    while not (running.errors and waiting.errors) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "ZeroDivisionError" in str(running.errors[0])
    assert "ZeroDivisionError" in str(waiting.errors[0])
    with pytest.raises(DecodeLoopFailed, match="reload the model"):
        loop.submit(Asked([1], 5).sequences)


def test_stop_fails_the_remaining_requests() -> None:
    loop = loop_of(SumExecutor(slots=1, max_length=100_000))
    one = Asked([1], 90_000)
    loop.submit(one.sequences)
    loop.start()
    while not one.pieces:
        time.sleep(0.001)
    loop.stop()
    assert isinstance(one.errors[0], DecodeLoopFailed)


def test_end_tokens_end_an_answer_after_min_tokens() -> None:
    tokens = expected([1, 2], 10)
    end = tokens[3]
    first = tokens.index(end)
    stopped, forced = Asked([1, 2], 10, ends=(end,)), Asked([1, 2], 10, ends=(end,), min_tokens=8)
    loop = loop_of(SumExecutor())
    loop.submit(stopped.sequences)
    loop.submit(forced.sequences)
    loop.run_until_idle()
    assert stopped.tokens == tokens[: first + 1]
    assert stopped.pieces[-1].finish_reason == "stop"
    assert len(stopped.text) == first, "the end token is no text"
    assert end not in forced.tokens[:8]
    assert len(forced.tokens) > 8


def test_stop_string_ends_the_text_before_it() -> None:
    letters = "".join(chr(ord("A") + token) for token in expected([1, 2], 10))
    one = Asked([1, 2], 10, stop_words=(letters[4:6], "never"))
    loop = loop_of(SumExecutor())
    loop.submit(one.sequences)
    loop.run_until_idle()
    assert one.text == letters[: letters.index(letters[4:6])]
    assert one.pieces[-1].finish_reason == "stop"


def test_sequences_of_a_request_share_its_prefill() -> None:
    executor = SumExecutor(slots=4)
    loop = loop_of(executor, prefill=100)
    prompt = list(range(20))
    one = Asked(prompt, 5, n=3)
    loop.submit(one.sequences)
    loop.run_until_idle()
    assert all(sequence.sampler.generated == expected(prompt, 5) for sequence in one.sequences)
    assert loop.stats.reused_tokens == 2 * 19
    assert {piece.index for piece in one.pieces} == {0, 1, 2}


def test_full_slot_ends_an_answer() -> None:
    loop = loop_of(SumExecutor(slots=1, max_length=8))
    one = Asked([1, 2, 3], 100)
    loop.submit(one.sequences)
    loop.run_until_idle()
    assert one.tokens == expected([1, 2, 3], 5)
    assert one.pieces[-1].finish_reason == "length"


def test_slots_are_compacted_when_sequences_finish() -> None:
    executor = SumExecutor(slots=6)
    loop = loop_of(executor, prefill=100)
    requests = [Asked([number, 7], 3 if number < 5 else 20) for number in range(6)]
    for one in requests:
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert requests[5].tokens == expected([5, 7], 20)
    assert executor.calls[-1][1] == 1, "one row is left, and one row is run"


def test_failing_sampler_fails_only_its_request() -> None:
    loop = loop_of(SumExecutor(slots=2), prefill=100)
    bad, good = Asked([1], 8, temperature=1.0, logit_bias={10**9: 1.0}), Asked([2], 8)
    loop.submit(bad.sequences)
    loop.submit(good.sequences)
    loop.run_until_idle()
    assert isinstance(bad.errors[0], IndexError)
    assert len(bad.errors) == 1
    assert good.tokens == expected([2], 8)
    assert loop.cache.free_slots == 2


@pytest.mark.parametrize("kind", [{}, {"top_p": 0.95}])
def test_failing_sampler_leaves_other_random_streams_unchanged(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answers(others: list[Asked]) -> list[int]:
        loop = loop_of(SumExecutor(), prefill=100)
        own = Asked([1, 2, 3], 8, temperature=30.0, random_seed=7, **kind)
        for one in (own, *others):
            loop.submit(one.sequences)
        loop.run_until_idle()
        return own.tokens

    alone = answers([])
    plain = sampling._filter
    calls: list[RequestOptions] = []

    def failing(scores: np.ndarray, options: Sequence[RequestOptions], size: int) -> tuple[np.ndarray, np.ndarray]:
        calls.extend(option for option in options if option.typical_p == 0.5)
        if len(calls) > 1 and options[-1] is calls[-1]:  # its second token, beside that of another request
            raise MemoryError("no room")
        return plain(scores, options, size)

    monkeypatch.setattr(sampling, "_filter", failing)
    bad = Asked([4, 5], 3, temperature=30.0, random_seed=9, typical_p=0.5)
    assert answers([bad]) == alone
    assert isinstance(bad.errors[0], MemoryError)
    assert "choosing for 2 rows failed, each is tried alone: MemoryError('no room')" in caplog.text

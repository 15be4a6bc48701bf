"""The decode loop of an encoder-decoder: rows attend to their own sources, which are encoded ahead and freed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from builder.runtime.generation.decode_loop import DecodeLoop, DecodeLoopFailed
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.sequences import AnswerPiece, GeneratedSequence, Request
from builder.runtime.generation.text import StopStrings
from tests.generation.asked import Letters
from tests.generation.executors import ReadingExecutor, answered


class Read:
    """One request of n sequences, and its outcome."""

    def __init__(self, text: list[int], count: int, n: int = 1, deadline: float | None = None) -> None:
        self.text, self.count = text, count
        self.pieces: list[AnswerPiece] = []
        self.errors: list[Exception] = []
        options = RequestOptions(temperature=0.0, n=n)
        self.request = Request(
            [1], options, count, self.pieces.append, self.errors.append, deadline, source=tuple(text)
        )
        self.sequences = [
            GeneratedSequence(
                self.request, Sampler(Rules(options), index, [1]), Letters(), StopStrings(()), frozenset()
            )
            for index in range(n)
        ]

    @property
    def answers(self) -> list[list[int]]:
        return [sequence.sampler.generated for sequence in self.sequences]


def texts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 50, int(generator.integers(1, longest))).tolist() for _ in range(count)]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_each_sequence_attends_to_its_own_source(slots: int) -> None:
    executor = ReadingExecutor(slots)
    loop = DecodeLoop(executor, SchedulerLimits(100, 64))
    requests = [Read(text, 1 + number % 9, n=1 + number % 2) for number, text in enumerate(texts(30))]
    for one in requests:
        loop.submit(one.sequences)
        loop.encode()
        loop.step()
    loop.run_until_idle()
    for one in requests:
        assert one.answers == [answered(one.text, one.count)] * len(one.sequences)
        assert not one.errors
    assert loop.cache.free_slots == slots
    assert loop.encoder_cache is not None
    assert loop.encoder_cache.allocated == [False] * slots
    assert set(executor.sources.place_of.tolist()) == {-1}
    assert sum(map(len, executor.texts)) == len(requests), "each text is read once, for all sequences of its request"
    assert loop.stats.encoded_tokens == sum(len(one.text) for one in requests)


def test_encoder_batches_sources_of_similar_length() -> None:
    executor = ReadingExecutor(slots=8)
    loop = DecodeLoop(executor, SchedulerLimits(100, prefill_tokens=64))
    for length in (20, 21, 30, 22, 19, 20, 2, 3):
        loop.submit(Read([5] * length, 2).sequences)
    loop.run_until_idle()
    assert executor.texts[0] == [20, 21], "three of 22 tokens would be more than 64; 30 is too long for them"
    assert all(max(call) * len(call) <= 64 or len(call) == 1 for call in executor.texts)
    assert [2, 3] in executor.texts
    assert len(executor.texts) < 8


def test_encoder_encodes_ahead_of_a_free_slot() -> None:
    executor = ReadingExecutor(slots=1)
    loop = DecodeLoop(executor, SchedulerLimits(100, 64))
    first, second = Read([3, 4], 6), Read([9, 9, 9], 2)
    for one in (first, second):
        loop.submit(one.sequences)
    loop.encode()
    loop.step()
    loop.encode()
    assert second.request.encoded is not None
    assert len(first.answers[0]) == 1, "the first still writes"
    loop.run_until_idle()
    assert second.answers == [answered([9, 9, 9], 2)]


def test_encoder_skips_requests_that_ended() -> None:
    executor = ReadingExecutor(slots=1)
    loop = DecodeLoop(executor, SchedulerLimits(100, 64))
    late, gone, waiting = Read([1] * 5, 3, deadline=time.monotonic() - 1), Read([2] * 9, 3), Read([3] * 20, 3)
    gone.request.cancel()
    for one in (late, gone, waiting):
        loop.submit(one.sequences)
    loop.step()
    loop.run_until_idle()
    assert executor.texts == [[20]]
    assert "time was over" in str(late.errors[0])
    assert waiting.answers == [answered(waiting.text, 3)]


def test_encoder_thread_answers_as_the_loop_alone() -> None:
    executor = ReadingExecutor(slots=3)
    loop = DecodeLoop(executor, SchedulerLimits(1000, 64))
    loop.start()
    requests = [Read(text, 1 + number % 7) for number, text in enumerate(texts(200, seed=4))]
    for one in requests:
        loop.submit(one.sequences)
    deadline = time.monotonic() + 300
    while any(not one.pieces or not one.pieces[-1].finish_reason for one in requests) and time.monotonic() < deadline:
        time.sleep(0.005)
    loop.stop()
    for one in requests:
        assert one.answers == [answered(one.text, one.count)]
    assert loop.cache.free_slots == 3


def test_failed_encoder_fails_all_requests() -> None:
    class FailingExecutor(ReadingExecutor):
        def encode(self, rows: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
            raise ZeroDivisionError("division by zero")

    loop = DecodeLoop(FailingExecutor(slots=1), SchedulerLimits(100, 64))
    one = Read([1, 2], 3)
    loop.submit(one.sequences)
    loop.start()
    deadline = time.monotonic() + 300
    while not one.errors and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "ZeroDivisionError" in str(one.errors[0])
    with pytest.raises(DecodeLoopFailed, match="reload the model"):
        loop.submit(Read([1], 1).sequences)
    loop.stop()

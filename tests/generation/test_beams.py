"""Beam search beside other rows: it finds the best answers, copies caches, and does not change other rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from builder.runtime.generation.beams import BeamSearch, reorder
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.scheduler import DeadlineExceeded, SchedulerLimits
from builder.runtime.generation.sequences import AnswerPiece, BeamSequence, Request
from tests.generation.asked import Asked, Letters
from tests.generation.executors import (
    VOCABULARY,
    PagedSumExecutor,
    SearchingSumExecutor,
    SumExecutor,
    expected,
    likeliest,
)
from tests.generation.test_decode_loop import loop_of


def logits_after(tokens: list[int]) -> np.ndarray:
    """Return the logits of SumExecutor after `tokens`, from a new cache."""
    executor = SumExecutor(slots=1, max_length=64)
    return executor.run(0, np.array([tokens], np.int64), np.zeros(1, np.int64))[0].copy()


def best_answers(prompt: list[int], beams: int, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Run a reference beam search without a cache."""
    beams_kept: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(count):
        grown = []
        for score, tokens in beams_kept:
            row = logits_after([*prompt, *tokens]).astype(np.float64)
            row -= row.max() + np.log(np.exp(row - row.max()).sum())
            grown += [(score + row[token], (*tokens, token)) for token in range(VOCABULARY)]
        beams_kept = sorted(grown, reverse=True)[:beams]
    return beams_kept


class Searched:
    """Request for a beam search, and its outcome."""

    def __init__(self, prompt: list[int], count: int, beams: int, n: int = 1, deadline: float | None = None) -> None:
        self.pieces: list[AnswerPiece] = []
        self.errors: list[Exception] = []
        options = RequestOptions(temperature=0.0, num_beams=beams, n=n)
        self.request = Request(prompt, options, count, self.pieces.append, self.errors.append, deadline)
        search = BeamSearch(Rules(options, max_tokens=count), prompt, frozenset())
        self.beams = BeamSequence(self.request, search, Letters)

    @property
    def answers(self) -> list[tuple[int, ...]]:
        return [hypothesis.tokens for hypothesis in self.beams.search.ended[: self.request.options.n]]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("kind", "slots"), [(SumExecutor, 4), (SumExecutor, 9), (SearchingSumExecutor, 9)])
def test_searches_and_sequences_share_a_batch(kind: type[SumExecutor], slots: int, reuse: bool) -> None:
    """Greedy rows and searches of 2 to 4 beams join and leave; each gets the same answer as alone."""
    generator = np.random.default_rng(3)
    executor = kind(slots, max_length=40)
    loop = DecodeLoop(executor, SchedulerLimits(100, 5), reuse)
    begin = generator.integers(0, VOCABULARY, 4).tolist()
    searched, streams = [], []
    for number in range(18):
        prompt = [*begin, *generator.integers(0, VOCABULARY, int(generator.integers(1, 8))).tolist()]
        count = int(generator.integers(1, 7))
        if number % 3:
            searched.append(Searched(prompt, count, beams=2 + number % 3, n=2))
            loop.submit([searched[-1].beams])
        else:
            streams.append(Asked(prompt, count))
            loop.submit(streams[-1].sequences)
        for _ in range(int(generator.integers(0, 4))):
            loop.step()
    loop.run_until_idle()
    for one in streams:
        assert one.tokens == expected(one.request.prompt, one.request.max_tokens)
    for search in searched:
        width, count = search.request.options.num_beams, search.request.max_tokens
        assert search.answers == [tokens for _, tokens in best_answers(search.request.prompt, width, count)[:2]]
        assert [piece.finish_reason for piece in search.pieces] == ["length", "length"]
        assert [piece.index for piece in search.pieces] == [0, 1]
        best, second = (piece.score for piece in search.pieces)
        assert best is not None
        assert second is not None
        assert best >= second
        assert not search.errors
    assert loop.cache.free_slots == slots
    assert loop.stats.moved_positions > 0
    if isinstance(executor, SearchingSumExecutor):
        assert set(executor.counts) == {16}, "eight at most, in steps of 16"


def test_reorder_moves_only_second_children() -> None:
    assert reorder([4, 7, 5], [0, 1, 2]) == ([4, 7, 5], [])
    assert reorder([4, 7, 5], [2, 0, 1]) == ([5, 4, 7], []), "an order of beams moves nothing"
    assert reorder([4, 7, 5], [1, 1, 0]) == ([7, 5, 4], [(7, 5)])
    assert reorder([4, 7, 5], [0, 0, 0]) == ([4, 7, 5], [(4, 7), (4, 5)])
    assert reorder([4, 7, 5], [0]) == ([4, 7, 5], []), "fewer beams leave spare slots"


def test_search_copies_only_positions_beyond_the_common_prefix() -> None:
    """A beam that splits late copies only the positions since it diverged from its target."""
    copied: list[tuple[int, int]] = []

    class NotingExecutor(SumExecutor):
        def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
            copied.append((start, length))
            super().copy(source, target, length, start)

    loop = DecodeLoop(NotingExecutor(slots=2, max_length=64), SchedulerLimits(10, 100), reuse_prefixes=False)
    prompt = list(range(30))
    loop.submit([Searched(prompt, 12, beams=2).beams])
    loop.run_until_idle()
    assert copied[0] == (0, 30), "at the first split the second beam has nothing yet"
    assert all(length - start <= 11 for start, length in copied[1:])
    assert all(start >= 30 for start, _ in copied[1:]), "the prompt is never copied again"
    assert loop.stats.moved_positions == sum(length - start for start, length in copied)


def test_search_waits_for_its_slots_without_being_overtaken() -> None:
    loop = loop_of(SumExecutor(slots=3, max_length=40), prefill=100)
    first, wide, later = Asked([1], 6), Searched([2], 2, beams=3), Asked([3], 1)
    loop.submit(first.sequences)
    loop.step()
    loop.submit([wide.beams])
    loop.submit(later.sequences)
    loop.step()
    assert not later.tokens, "two slots are free, and they are kept for the search"
    loop.run_until_idle()
    assert later.tokens == expected([3], 1)
    assert wide.answers == [best_answers([2], 3, 2)[0][1]]


def steps(loop: DecodeLoop, count: int, streams: list[Asked]) -> None:
    """Run steps, each of which must give every stream one token."""
    for _ in range(count):
        before = [len(stream.tokens) for stream in streams]
        loop.step()
        assert [len(stream.tokens) for stream in streams] == [count + 1 for count in before]


@pytest.mark.parametrize("executor", [SumExecutor(20, max_length=64), PagedSumExecutor(20, 64, blocks=80)])
def test_stream_decodes_every_step_beside_sixteen_beams(executor: Executor) -> None:
    """Either may arrive first, while the other prefills or searches."""
    loop = DecodeLoop(executor, SchedulerLimits(100, 4))
    before, wide, after = Asked([1], 30), Searched(list(range(12)), 12, beams=16), Asked([2, 3], 12)
    loop.submit(before.sequences)
    loop.step()
    loop.submit([wide.beams])
    steps(loop, 4, [before])
    loop.submit(after.sequences)
    loop.step()
    assert after.tokens
    steps(loop, 4, [before, after])
    assert not wide.pieces, "the search runs meanwhile"
    loop.run_until_idle()
    assert before.tokens == expected([1], 30)
    assert after.tokens == expected([2, 3], 12)


def test_streams_use_spare_slots_without_delaying_a_search() -> None:
    loop = loop_of(SumExecutor(slots=20, max_length=64), prefill=100)
    running, waiting = Searched([1], 6, beams=16), Searched([2], 6, beams=16)
    loop.submit([running.beams])
    loop.submit([waiting.beams])
    streams = [Asked([3, number], 40) for number in range(8)]
    for stream in streams:
        loop.submit(stream.sequences)
    loop.step()
    assert [bool(stream.tokens) for stream in streams] == [True] * 4 + [False] * 4, "twenty slots but sixteen"
    while not running.pieces:
        loop.step()
    loop.step()
    assert waiting.beams.generated, "it begins when the search before it has ended, though streams wait too"
    loop.run_until_idle()
    assert [stream.tokens for stream in streams] == [expected([3, number], 40) for number in range(8)]
    assert waiting.answers == [best_answers([2], 16, 6)[0][1]]


def test_failed_or_late_search_fails_alone() -> None:
    loop = loop_of(SumExecutor(slots=6, max_length=40), prefill=100)
    late, broken, good = Searched([1], 30, 2, deadline=time.monotonic() - 1), Searched([2], 5, 2), Asked([3], 8)
    broken.beams.search.rules = Rules(
        RequestOptions(temperature=0.0, num_beams=2),
        bad_words=tuple((token,) for token in range(VOCABULARY)),
        max_tokens=5,
    )
    loop.submit([late.beams])
    loop.submit([broken.beams])
    loop.submit(good.sequences)
    loop.run_until_idle()
    assert isinstance(late.errors[0], DeadlineExceeded)
    assert "forbid every token" in str(broken.errors[0])
    assert good.tokens == expected([3], 8)
    assert loop.cache.free_slots == 6


class FailingRules(Rules):
    """Rules that fail after two tokens."""

    def _banned(self, prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
        if len(generated) == 2:
            raise ValueError("a broken rule")
        return []


@pytest.mark.parametrize("kind", [SumExecutor, SearchingSumExecutor])
def test_search_with_failing_rules_fails_alone(kind: type[SumExecutor]) -> None:
    loop = loop_of(kind(slots=6, max_length=40), prefill=100)
    broken, good, stream = Searched([1], 6, beams=2), Searched([2], 6, beams=2), Asked([3], 8)
    broken.beams.search.rules = FailingRules(
        RequestOptions(temperature=0.0, num_beams=2, no_repeat_ngram_size=2), max_tokens=6
    )
    loop.submit([broken.beams])
    loop.submit([good.beams])
    loop.submit(stream.sequences)
    loop.run_until_idle()
    assert [str(error) for error in broken.errors] == ["a broken rule"]
    assert good.answers == [best_answers([2], 2, 6)[0][1]]
    assert stream.tokens == expected([3], 8)
    assert loop.cache.free_slots == 6


def test_search_breaks_ties_by_beam_then_token() -> None:
    """Two beams have equal scores, and all 5,000 tokens are equally likely."""
    search = BeamSearch(Rules(RequestOptions(temperature=0.0, num_beams=2), max_tokens=9), [7], frozenset())
    search.generated, search.scores = [[0], [1]], np.zeros(2, np.float32)
    assert search.step(list(np.zeros((2, 5000), np.float32))) == [0, 0]
    assert search.generated == [[0, 0], [0, 1]]


def test_forced_token_is_the_only_continuation() -> None:
    """All other tokens of 5,000 are equal, and banned."""
    options = RequestOptions(temperature=0.0, num_beams=2)
    logits = np.random.default_rng(0).normal(size=(2, 5000)).astype(np.float32)
    search = BeamSearch(Rules(options, max_tokens=9, first=4321), [7], frozenset())
    assert search.step([logits[0]]) == [0]
    assert search.generated == [[4321]]
    assert search.scores.tolist() == [0.0]
    assert search.step([logits[1]]) == [0, 0]
    assert [tokens[1] for tokens in search.generated] == np.argsort(-logits[1])[:2].tolist()


ENDS = (4, 9)
SETTLED: dict[str, Rules] = {
    "plain": Rules(RequestOptions(temperature=0.0, num_beams=3), ENDS, max_tokens=9),
    "renormalised, nothing banned": Rules(
        RequestOptions(temperature=0.0, num_beams=3, renormalize_logits=True), ENDS, max_tokens=9
    ),
    "banned": Rules(
        RequestOptions(temperature=0.0, num_beams=3, no_repeat_ngram_size=1, min_tokens=3),
        ENDS,
        bad_words=((1,), (2, 3)),
        suppressed=(5, 6),
        begin_suppressed=(7,),
        max_tokens=9,
    ),
}


@pytest.mark.parametrize("kind", SETTLED)
def test_search_over_candidates_equals_search_over_all_logits(kind: str) -> None:
    """Search over 20 tokens, where many of the best are banned, and over 3,000."""
    for vocabulary in (20, 3000):
        table = np.random.default_rng(1).normal(size=(vocabulary, vocabulary)).astype(np.float32)
        of_all, of_few = (BeamSearch(SETTLED[kind], [7], frozenset(ENDS)) for _ in range(2))
        while not of_all.is_done:
            logits = table[[(generated or [7])[-1] for generated in of_all.generated]]
            count = of_few.candidates_needed()
            assert count >= 9, "three for each beam: two may end"
            assert of_few.step(likeliest(logits, count)) == of_all.step(list(logits))
            assert of_few.generated == of_all.generated
            np.testing.assert_allclose(of_few.scores, of_all.scores, rtol=1e-5)
        assert of_few.is_done
        assert [one.tokens for one in of_few.ended] == [one.tokens for one in of_all.ended]


@pytest.mark.parametrize("kind", ["plain", "banned"])
def test_search_prefers_the_higher_logit_of_equal_scores(kind: str) -> None:
    """Forty logits round to one log-probability; the choice does not depend on the number of candidates read."""
    logits = np.random.default_rng(2).uniform(1e-9, 2e-9, (1, 40)).astype(np.float32)
    rules = SETTLED[kind]
    order = [token for token in np.argsort(-logits[0]).tolist() if token not in (*rules.banned_tokens([7], []), *ENDS)]
    for read in (None, 20, 32):
        search = BeamSearch(rules, [7], frozenset(ENDS))
        assert 0 < search.candidates_needed() <= 20
        search.step(list(logits) if read is None else likeliest(logits, read))
        assert [tokens[0] for tokens in search.generated] == order[:3]


@pytest.mark.parametrize(
    "rules",
    [
        Rules(RequestOptions(num_beams=2, repetition_penalty=1.2), max_tokens=5),
        Rules(RequestOptions(num_beams=2, logit_bias={3: 1.0}), max_tokens=5),
        Rules(RequestOptions(num_beams=2), sequence_bias=(((3, 4), 1.0),), max_tokens=5),
        Rules(RequestOptions(num_beams=2), decay=(2, 1.1), max_tokens=5),
        Rules(RequestOptions(num_beams=2), first=3, max_tokens=5),
        Rules(RequestOptions(num_beams=2), last=(3,), max_tokens=1),
        Rules(RequestOptions(num_beams=2, renormalize_logits=True), bad_words=((1,),), max_tokens=5),
    ],
)
def test_search_with_changed_scores_needs_all_logits(rules: Rules) -> None:
    assert BeamSearch(rules, [7], frozenset()).candidates_needed() == 0


def test_search_whose_candidates_are_all_banned_is_refused() -> None:
    rules = Rules(RequestOptions(num_beams=2), bad_words=tuple((token,) for token in range(6)), max_tokens=5)
    search = BeamSearch(rules, [7], frozenset())
    logits = np.zeros((1, 6), np.float32)
    with pytest.raises(RuntimeError, match="forbid every token"):
        search.step(likeliest(logits, search.candidates_needed()))

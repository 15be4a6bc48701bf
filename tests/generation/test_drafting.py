"""A draft model never changes the text, and its accepted tokens save steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.base import Executor, last_of_rows
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.speculation import (
    INITIAL_DRAFT_LENGTH,
    MAX_DRAFT_LENGTH,
    MAX_PAUSE,
    Drafter,
    DraftLength,
)
from tests.generation.asked import Asked
from tests.generation.executors import VOCABULARY, PagedSumExecutor, SumExecutor, expected
from tests.generation.test_prompt_lookup import CopyingExecutor, said

LENGTH = 400
PROMPT = np.random.default_rng(3).integers(0, VOCABULARY, 30).tolist()


class Target(SumExecutor):
    can_speculate = True


class PagedTarget(PagedSumExecutor):
    can_speculate = True


class Wrong(SumExecutor):
    """Draft that never proposes the token of SumExecutor."""

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        return np.roll(super().run(first, tokens, lengths, logits_positions), 1, axis=1)


class Fickle(SumExecutor):
    """Draft that is wrong after each third token."""

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        logits = super().run(first, tokens, lengths, logits_positions)
        assert logits_positions is None
        rows, places = np.divmod(last_of_rows(tokens), tokens.shape[1])
        wrong = (lengths[rows] + places) % 3 == 0
        return np.where(wrong[:, None], np.roll(logits, 1, axis=1), logits)


DRAFTS: dict[str, type[SumExecutor]] = {"right": SumExecutor, "wrong": Wrong, "fickle": Fickle}


def answered(executor: Executor, requests: list[Asked], draft: Executor | None = None, prefill: int = 64) -> DecodeLoop:
    loop = DecodeLoop(executor, SchedulerLimits(100, prefill), draft=draft)
    for one in requests:
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert loop.cache.free_slots == executor.geometry.slots
    assert not any(one.errors for one in requests)
    return loop


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 3.0, "random_seed": 3},
    {"temperature": 5.0, "random_seed": 4, "top_p": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.05, "no_repeat_ngram_size": 30},
    {"n": 2, "temperature": 4.0, "random_seed": 5},
    {"ends": (7,), "min_tokens": 20},
    {"stop_words": ("ABC", "Q")},
)


def check_same_answers(target: type[SumExecutor], draft: type[SumExecutor], options: dict[str, Any]) -> None:
    """Compare answers of `target` with and without `draft`; each of its wrong tokens may cost a step."""
    for count in (1, 2, 100):
        plain, ahead = (Asked(PROMPT, count, **options) for _ in range(2))
        slow = answered(target(4, LENGTH), [plain])
        fast = answered(target(4, LENGTH), [ahead], draft(2, LENGTH))
        for a, b in zip(plain.sequences, ahead.sequences, strict=True):
            assert a.sampler.generated == b.sampler.generated
        assert said(ahead) == said(plain)
        assert fast.stats.steps <= slow.stats.steps + fast.stats.drafted_tokens - fast.stats.right_drafts


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_drafting_does_not_change_answers(options: dict[str, Any], kind: str) -> None:
    check_same_answers(Target, DRAFTS[kind], options)


def test_good_draft_saves_steps_and_bad_draft_pauses() -> None:
    stats = {}
    for kind, draft in DRAFTS.items():
        request = Asked(PROMPT, 50)
        stats[kind] = answered(Target(4, LENGTH), [request], draft(1, LENGTH)).stats
        assert request.tokens == expected(PROMPT, 50)
    assert stats["right"].right_drafts == stats["right"].drafted_tokens > 35
    assert stats["right"].steps <= 10
    assert stats["wrong"].right_drafts == 0 < stats["wrong"].drafted_tokens <= 16
    kept = stats["wrong"].right_guesses
    assert stats["wrong"].steps == 49 - kept, "the first token comes with the end of the prompt"
    assert 0 < stats["fickle"].right_drafts < stats["fickle"].drafted_tokens
    assert stats["right"].steps < stats["fickle"].steps < stats["wrong"].steps


def test_prompt_lookup_is_preferred_to_the_draft() -> None:
    """The target repeats nine tokens of ten; the draft is wrong each time."""
    prompt = [*PROMPT, *PROMPT[:3]]
    plain, ahead = Asked(prompt, 150), Asked(prompt, 150)
    slow = answered(CopyingExecutor(1, LENGTH), [plain]).stats
    fast = answered(CopyingExecutor(1, LENGTH), [ahead], SumExecutor(1, LENGTH)).stats
    assert ahead.tokens == plain.tokens
    assert fast.right_guesses > 0 < fast.drafted_tokens
    assert fast.steps <= slow.steps


@pytest.mark.parametrize("blocks", [13, 60])
@pytest.mark.parametrize("paged", [True, False])
def test_paged_drafting_does_not_change_answers(blocks: int, paged: bool) -> None:
    """24 requests over 4 slots, more than the draft has; on few blocks some are preempted and resumed."""
    prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, 20 + seed).tolist() for seed in range(24)]
    requests = [Asked([*PROMPT[:10], *prompt], 90) for prompt in prompts]
    draft = PagedSumExecutor(2, LENGTH, 13) if paged else SumExecutor(2, LENGTH)
    stats = answered(PagedTarget(4, LENGTH, blocks), requests, draft).stats
    for one in requests:
        assert one.tokens == expected(one.request.prompt, 90)
    assert (stats.preemptions > 0) == (blocks == 13)
    assert stats.right_drafts == stats.drafted_tokens > 0


def test_drafter_follows_a_sequence_to_another_slot() -> None:
    """When the second sequence ends, the third moves into its slot, and runs alone when the first ends too."""
    requests = [Asked([1, 2], 6), Asked([3], 3), Asked(PROMPT, 60)]
    stats = answered(Target(3, LENGTH), requests, SumExecutor(1, LENGTH)).stats
    for one in requests:
        assert one.tokens == expected(one.request.prompt, one.request.max_tokens)
    assert requests[2].sequences[0].slots == [1]
    assert stats.right_drafts == stats.drafted_tokens > 30


def test_drafter_prefills_a_long_prompt_in_chunks() -> None:
    draft = SumExecutor(1, LENGTH)
    request = Asked([*PROMPT] * 5, 40)
    stats = answered(Target(1, LENGTH), [request], draft, prefill=16).stats
    assert max(new for _, _, new in draft.calls) == 16
    assert stats.right_drafts == stats.drafted_tokens > 0
    assert request.tokens == expected(request.request.prompt, 40)


def test_drafter_limits_the_prefill_of_a_step() -> None:
    draft = SumExecutor(2, LENGTH)
    drafter = Drafter(draft, VOCABULARY)
    first, second = PROMPT[:10], PROMPT[10:20]
    drafter.start_step(16, 8)
    assert drafter.propose(1, first, 3, 0) == expected(first, 3)
    assert drafter.propose(2, second, 3, 0) == []
    assert [new for _, _, new in draft.calls] == [10, 1, 1, 6]
    drafter.start_step(16, 8)
    assert drafter.propose(2, second, 3, 0) == expected(second, 3)
    other = [*first, 49]
    assert drafter.propose(1, other, 2, 0) == expected(other, 2), "of a guess that was not kept nothing is left"
    assert draft.calls[-2] == (0, 1, 1), "and what was read is not read again"


def test_drafter_proposes_tokens_of_the_targets_vocabulary() -> None:
    """Vocabularies are padded to different sizes."""
    drafter = Drafter(SumExecutor(1, LENGTH), 10)
    drafter.start_step(100, 20)
    assert max(drafter.propose(1, PROMPT, 20, 0)) < 10


def test_guided_answer_is_not_speculated() -> None:
    request = Asked(PROMPT, 20)
    (sequence,) = request.sequences
    assert sequence.max_speculative(LENGTH) == 19
    sequence.sampler.guide = object()  # type: ignore[assignment]
    assert sequence.max_speculative(LENGTH) == 0


def test_draft_length_follows_accepted_tokens() -> None:
    draft, sizes, position = DraftLength(), [], 0
    for right in (4, 6, 7, 3, 2, 0, 0, 0, 0, 0):
        sizes.append(draft.next(position))
        draft.learn(sizes[-1], right)
        position += 1 + right
    assert sizes == [INITIAL_DRAFT_LENGTH, 6, MAX_DRAFT_LENGTH, MAX_DRAFT_LENGTH, 6, 5, 4, 3, 2, 1]
    assert draft.next(position) == 0
    assert draft.next(position + 6) == 0
    assert draft.next(position + 7) == 1
    draft.learn(1, 1)
    assert draft.next(position + 9) == 3


def test_draft_length_grows_only_with_whole_proposals() -> None:
    """Regression: a proposal that the step's budget cut short counted as a whole one, and the next was longer."""
    draft = DraftLength()
    draft.learn(1, 1)
    assert draft.next(1) == INITIAL_DRAFT_LENGTH
    draft.learn(2, 1)
    assert draft.next(2) == INITIAL_DRAFT_LENGTH - 1


def test_draft_length_pauses_a_draft_that_is_never_accepted() -> None:
    draft, guessed = DraftLength(), 0
    for position in range(2000):
        ahead = draft.next(position)
        if ahead:
            guessed += ahead
            draft.learn(ahead, 0)
    assert guessed <= 10 + 6 + 2000 // MAX_PAUSE

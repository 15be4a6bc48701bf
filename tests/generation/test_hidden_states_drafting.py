"""A draft that reads the target's hidden states never changes the text, and reads those of the right tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.base import CallPart, DraftAnswer, Executor
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.speculation import HiddenStatesDrafter
from tests.generation.asked import Asked
from tests.generation.executors import BLOCK, VOCABULARY, PagedSumExecutor, SumExecutor, expected, next_token
from tests.generation.test_drafting import LENGTH, OPTIONS, PROMPT, PagedTarget, answered, check_same_answers


class Target(SumExecutor):
    """The hidden state of a token is the token itself, read from its cache."""

    can_speculate = True

    def hidden_states(self, slot: int, start: int, end: int) -> np.ndarray:
        return self.arena["key_0"][slot, :, start:end]


class Reader(SumExecutor):
    """Draft that is right if all tokens in its cache, and the hidden states that came with them, are the sequence's."""

    reads_hidden_states = True

    def __init__(self, slots: int = 4, max_length: int = 32) -> None:
        super().__init__(slots, max_length)
        self.read = np.full((slots, max_length), -1, np.int64)  # hidden states by slot and position

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        raise AssertionError("a token alone is not enough")

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        super().copy(source, target, length, start)
        self.read[target, start:length] = self.read[source, start:length]

    def draft_token(
        self, slot: int, tokens: Sequence[int], start: int, hidden_states: np.ndarray
    ) -> tuple[int, np.ndarray]:
        assert hidden_states.shape == (1, len(tokens), 1)
        self.calls.append((slot, start, len(tokens)))
        end = start + len(tokens)
        held = self.arena["key_0"][slot, 0, :end, 0]
        held[start:] = tokens
        self.read[slot, start:end] = hidden_states[0, :, 0]
        assert self.read[slot, 1:end].tolist() == held[:-1].tolist(), "the hidden state is that of the token before"
        sequence = [int(self.read[slot, 0]), *map(int, held)]
        return self.choose(sequence), np.full((1, 1, 1), tokens[-1], np.float32)

    def choose(self, sequence: list[int]) -> int:
        return next_token(sequence)


class Wrong(Reader):
    def choose(self, sequence: list[int]) -> int:
        return (next_token(sequence) + 1) % VOCABULARY


class Fickle(Reader):
    """Draft that is wrong after each third token."""

    def choose(self, sequence: list[int]) -> int:
        return (next_token(sequence) + (len(sequence) % 3 == 0)) % VOCABULARY


class ReadTarget(PagedTarget):
    def hidden_states(self, slot: int, start: int, end: int) -> np.ndarray:
        return np.zeros((1, end - start, 1), np.float32)


class PagedReader(PagedSumExecutor):
    """Draft over blocks, which takes PROMPT's first token for the one that it does not cache."""

    reads_hidden_states = True

    def draft(self, part: CallPart, hidden_states: np.ndarray) -> DraftAnswer:
        logits = self.run(*part)
        return DraftAnswer(logits, logits.argmax(-1), np.zeros((1, 1, 1), np.float32))

    def next_token(self, held: list[int]) -> int:
        return next_token([PROMPT[0], *held])


DRAFTS: dict[str, type[Reader]] = {"right": Reader, "wrong": Wrong, "fickle": Fickle}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_hidden_states_draft_does_not_change_answers(options: dict[str, Any], kind: str) -> None:
    check_same_answers(Target, DRAFTS[kind], options)


def test_hidden_states_draft_counts_tokens_and_pauses() -> None:
    stats = {}
    for kind, draft in DRAFTS.items():
        request = Asked(PROMPT, 50)
        stats[kind] = answered(Target(4, LENGTH), [request], draft(1, LENGTH)).stats
        assert request.tokens == expected(PROMPT, 50)
    assert stats["right"].right_drafts == stats["right"].drafted_tokens > 35
    assert stats["wrong"].right_drafts == 0 < stats["wrong"].drafted_tokens <= 16
    assert 0 < stats["fickle"].right_drafts < stats["fickle"].drafted_tokens
    assert stats["right"].steps < stats["fickle"].steps < stats["wrong"].steps == 49


def test_hidden_states_draft_follows_sequences_that_join_leave_and_move() -> None:
    """24 requests over 4 slots, of which one outlasts the others; they start alike, so that slots are copied."""
    prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, 2 + seed).tolist() for seed in range(24)]
    requests = [Asked([*PROMPT[:10], *prompt], 200 if number == 20 else 40) for number, prompt in enumerate(prompts)]
    stats = answered(Target(4, LENGTH), requests, Reader(2, LENGTH)).stats
    for one in requests:
        assert one.tokens == expected(one.request.prompt, one.request.max_tokens)
    assert stats.reused_tokens > 100
    assert stats.right_drafts == stats.drafted_tokens > 0


def test_hidden_states_draft_evicts_sequences_from_few_blocks() -> None:
    """Both sequences fit into the draft's blocks as they begin, and one of them as they end."""
    requests = [Asked([*PROMPT, number], 90) for number in (1, 2)]
    stats = answered(ReadTarget(2, LENGTH, 60), requests, PagedReader(2, 160, 160 // BLOCK)).stats
    for one in requests:
        assert one.tokens == expected(one.request.prompt, 90)
    assert stats.right_drafts == stats.drafted_tokens > 0


def test_hidden_states_draft_reads_a_second_text_in_the_same_slots() -> None:
    """The second prompt differs from the first in its first token alone, which has no place in the draft's cache."""
    loop = DecodeLoop(Target(1, LENGTH), SchedulerLimits(100, 64), draft=Reader(1, LENGTH))
    for first in (1, 2, 1):
        request = Asked([first, *PROMPT], 40)
        loop.submit(request.sequences)
        loop.run_until_idle()
        assert request.tokens == expected(request.request.prompt, 40)
    assert loop.stats.right_drafts == loop.stats.drafted_tokens > 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_hidden_states_draft_reads_short_prompts_and_full_slots(count: int) -> None:
    """The prompt is as short as can be, and the answer fills the slot."""
    prompt = PROMPT[:count]
    request = Asked(prompt, 40 - count)
    stats = answered(Target(1, 40), [request], Reader(1, 40)).stats
    assert request.tokens == expected(prompt, 40 - count)
    assert stats.right_drafts == stats.drafted_tokens > 20


def test_hidden_states_drafter_prefills_in_chunks() -> None:
    target, draft = _target_of(PROMPT), Reader(2, LENGTH)
    drafter = HiddenStatesDrafter(draft, target)
    for done in ([], [], expected(PROMPT, 3)):
        drafter.start_step(12, 8)
        assert drafter.propose(1, PROMPT, 3, 0) == done
    assert draft.calls == [(0, 0, 12), (0, 12, 12), (0, 24, 5), (0, 29, 1), (0, 30, 1)]
    drafter.start_step(12, 8)
    kept = [*PROMPT, *expected(PROMPT, 2)]
    target.arena["key_0"][0, 0, : len(kept), 0] = kept
    assert drafter.propose(1, kept, 1, 0) == expected(kept, 1)
    assert draft.calls[-1] == (0, 29, 2), "tokens that ran with the draft's own hidden states run again"


def test_hidden_states_of_other_executors_are_refused() -> None:
    plain: Executor = SumExecutor(1, LENGTH)
    with pytest.raises(NotImplementedError, match="keeps no hidden states"):
        plain.hidden_states(0, 0, 1)
    with pytest.raises(NotImplementedError, match="reads no hidden states"):
        plain.draft_token(0, [1], 0, np.zeros((1, 1, 1), np.float32))


def _target_of(tokens: Sequence[int]) -> Target:
    target = Target(1, LENGTH)
    target.run(0, np.array([tokens], np.int64), np.zeros(1, np.int64))
    return target

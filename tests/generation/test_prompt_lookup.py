"""Prompt lookup saves steps without changing a token or a random draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.building.verify.generation import geometry_of
from builder.graphs.export.decoder import export_decoder
from builder.runtime.contract import Session
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.base import last_of_rows
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.scheduler import MAX_STEP_TOKENS, SchedulerLimits
from builder.runtime.generation.sequences import SequenceStatus
from builder.runtime.generation.slot_cache import common_length
from builder.runtime.generation.speculation import MAX_LOOKUP_LENGTH, PRIORS, PromptLookup, least_probability
from tests.decoders import make_decoder
from tests.generation.asked import Asked
from tests.generation.executors import PagedSumExecutor, SumExecutor, expected
from tests.tiny_encoders import VOCABULARY as WORDS

VOCABULARY = 50


class CopyingExecutor(SumExecutor):
    """Executor that repeats earlier text nine times out of ten, and otherwise behaves like SumExecutor."""

    can_speculate = True

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        logits = super().run(first, tokens, lengths, logits_positions)
        places = last_of_rows(tokens) if logits_positions is None else logits_positions
        for number, (row, column) in enumerate(zip(*np.divmod(places, tokens.shape[1]), strict=True)):
            held = self.arena["key_0"][first + row, 0, : lengths[row] + column + 1, 0].astype(int).tolist()
            copied = copied_token(held)
            if copied is not None:
                logits[number, copied] += 12.0
        return logits


class CopyingPagedExecutor(PagedSumExecutor):
    """CopyingExecutor over blocks."""

    def next_token(self, held: list[int]) -> int:
        copied = copied_token(held)
        return super().next_token(held) if copied is None else copied


def copied_token(held: list[int]) -> int | None:
    if len(held) % 10 == 9:
        return None
    for start in range(len(held) - 4, -1, -1):
        if held[start : start + 3] == held[-3:]:
            return held[start + 3]
    return None


def answer(guesses: bool, prompt: list[int], count: int, **options: Any) -> tuple[Asked, SumExecutor, DecodeLoop]:
    executor = CopyingExecutor(slots=4, max_length=400)
    executor.can_speculate = guesses
    loop = DecodeLoop(executor, SchedulerLimits(100, 64))
    request = Asked(prompt, count, **options)
    loop.submit(request.sequences)
    loop.run_until_idle()
    assert loop.cache.free_slots == 4
    return request, executor, loop


def said(request: Asked) -> dict[int, list[Any]]:
    """Return the text, tokens, finish reason and count of each sequence, in however many pieces they came."""
    answers: dict[int, list[Any]] = {}
    for piece in request.pieces:
        text, tokens, reason, _ = answers.get(piece.index, ["", (), "", 0])
        assert not reason, "nothing comes after the last piece"
        text, tokens = text + piece.text, tokens + piece.tokens
        answers[piece.index] = [text, tokens, piece.finish_reason, piece.completion_tokens]
    return answers


PROMPT = np.random.default_rng(2).integers(0, VOCABULARY, 40).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "random_seed": 3},
        {"temperature": 2.0, "random_seed": 4, "top_p": 0.9, "logprobs": 2},
        {"repetition_penalty": 1.05, "no_repeat_ngram_size": 30},
        {"n": 2, "temperature": 1.0, "random_seed": 5},
        {"ends": (7,), "min_tokens": 20},
        {"stop_words": ("ABC", "Q")},
    ],
)
def test_prompt_lookup_does_not_change_answers(options: dict[str, Any]) -> None:
    prompt = [*PROMPT, *PROMPT[:3]]
    for count in (1, 2, 150):
        plain, slow, _ = answer(False, prompt, count, **options)
        ahead, fast, loop = answer(True, prompt, count, **options)
        for a, b in zip(plain.sequences, ahead.sequences, strict=True):
            assert a.sampler.generated == b.sampler.generated
        assert said(ahead) == said(plain)
        assert len(fast.calls) <= len(slow.calls)
        if count == 150 and not options:
            assert len(fast.calls) < len(slow.calls) / 2
            assert 0 < loop.stats.right_guesses <= loop.stats.guessed_tokens
            assert len(ahead.pieces) == len(fast.calls), "tokens of one step are one message"


def test_rejected_tokens_are_not_reused_as_a_prefix() -> None:
    """A later prompt that starts with rejected tokens must not reuse them from the cache."""
    executor = CopyingExecutor(slots=1, max_length=400)
    loop = DecodeLoop(executor, SchedulerLimits(100, 64))
    first = Asked([*PROMPT, *PROMPT[:3]], 60)
    loop.submit(first.sequences)
    loop.run_until_idle()
    held = loop.cache.tokens[0]
    assert held == [*first.request.prompt, *first.tokens][: len(held)]
    np.testing.assert_array_equal(executor.arena["key_0"][0, 0, : len(held), 0].astype(int), held)


def test_speculation_is_off_while_several_slots_run() -> None:
    executor = SumExecutor(slots=2, max_length=200)
    executor.can_speculate = True
    loop = DecodeLoop(executor, SchedulerLimits(100, 64))
    requests = [Asked([1, 2, 3, 4] * 6, 30), Asked([5, 6, 7, 8] * 6, 30)]
    for one in requests:
        loop.submit(one.sequences)
    loop.run_until_idle()
    for one in requests:
        assert one.tokens == expected(one.request.prompt, 30)
    assert loop.stats.guessed_tokens <= MAX_LOOKUP_LENGTH, "but for the last steps of whoever is left alone"


@pytest.mark.parametrize("blocks", [13, 60])
def test_paged_speculation_does_not_change_answers(blocks: int) -> None:
    """Twelve repetitive requests and twelve others, also on few blocks, where some are preempted."""
    prompts = [np.random.default_rng(seed).integers(0, VOCABULARY, 20 + seed).tolist() for seed in range(24)]
    texts, calls = [], []
    for guesses in (False, True):
        executor = CopyingPagedExecutor(4, 400, blocks)
        executor.can_speculate = guesses
        loop = DecodeLoop(executor, SchedulerLimits(100, 64))
        requests = [
            Asked([*prompt, *prompt[:3]] if number % 2 else prompt, 90) for number, prompt in enumerate(prompts)
        ]
        for one in requests:
            loop.submit(one.sequences)
        loop.run_until_idle()
        assert loop.cache.free_slots == 4
        assert (loop.stats.preemptions > 0) == (blocks == 13)
        assert (loop.stats.right_guesses > 0) == guesses
        for slot, held in enumerate(loop.cache.tokens):
            assert any(held == [*one.request.prompt, *one.tokens][: len(held)] for one in requests), slot
        texts.append([one.tokens for one in requests])
        calls.append(len(executor.calls))
    assert texts[0] == texts[1]
    assert calls[1] < 0.8 * calls[0]


def test_step_of_most_rows_runs_no_speculative_tokens() -> None:
    executor = CopyingPagedExecutor(MAX_STEP_TOKENS, 200, 4000)
    executor.can_speculate = True
    loop = DecodeLoop(executor, SchedulerLimits(100, 512))
    for _ in range(MAX_STEP_TOKENS):
        loop.submit(Asked([*PROMPT, *PROMPT[:3]], 100).sequences)
    for _ in range(10):  # to the end of every prompt, before the end of an answer
        loop.step()
    assert [sequence.status for sequence in loop.scheduler.running] == MAX_STEP_TOKENS * [SequenceStatus.DECODING]
    before = loop.stats.guessed_tokens
    loop.step()
    assert executor.calls[-1] == MAX_STEP_TOKENS
    assert loop.stats.guessed_tokens == before


def proposals(lookup: PromptLookup, text: list[int], rows: int) -> tuple[int, int, int]:
    """Return the steps that `text` takes after what `lookup` has seen, and its tokens run ahead and kept."""
    steps, run, kept, position = 0, 0, 0, 0
    while position < len(text):
        tokens = lookup.propose(len(text) - position - 1, least_probability(rows))
        right = common_length(tokens, text[position:])
        lookup.extend(text[position : position + right + 1])
        steps, run, kept, position = steps + 1, run + len(tokens), kept + right, position + right + 1
    return steps, run, kept


def test_prompt_lookup_stops_where_text_does_not_repeat() -> None:
    """The same three tokens recur, followed by another token each time."""
    text = [token for number in range(400) for token in (1, 2, 3, 100 + number)]
    lookup = PromptLookup([0, 1, 2, 3])
    assert lookup.probabilities == list(PRIORS)
    steps, run, kept = proposals(lookup, text, rows=1)
    assert run - kept <= 40, "of 1,600 tokens"
    assert kept > 400, "two of three tokens were worth it"
    assert steps == len(text) - kept


def test_prompt_lookup_runs_text_that_repeats_ahead() -> None:
    text = list(range(300))
    lookup = PromptLookup([*text, *text[:4]])
    steps, run, kept = proposals(lookup, text[4:], rows=1)
    assert run == kept == 296 - steps
    assert steps < 40
    assert len(PromptLookup([*text, *text[:4]]).propose(2, 0.1)) == 2


def test_prompt_lookup_continues_a_loop_past_the_end_of_the_text() -> None:
    lookup = PromptLookup([9, 1, 2, 1, 2, 1, 2])
    assert lookup.propose(7, 0.01) == [1, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize(("tokens", "expected"), [([], []), ([1], []), ([1, 2], []), ([1, 1], [1])])
def test_prompt_lookup_proposes_nothing_without_a_match(tokens: list[int], expected: list[int]) -> None:
    assert PromptLookup(tokens).propose(5, 0.1) == expected


def test_tokens_must_be_more_probable_the_more_rows_run() -> None:
    """A token that is right half of the time is worth running in a step of one row, not of 64."""
    text = [token for number in range(200) for token in (1, 2 + number % 2)]
    run = [
        proposals(PromptLookup([0, 1]), np.random.default_rng(0).permuted(text).tolist(), rows)[1] for rows in (1, 64)
    ]
    assert run[0] > 0 == run[1]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "gemma4_text", "starcoder2"])
def test_prompt_lookup_does_not_change_text_of_real_graphs(model_type: str, tmp_path: Path) -> None:
    """Text from random weights soon repeats itself, long after windows of 16 tokens are exceeded."""
    exported = export_decoder(make_decoder(model_type), tmp_path, 128)
    prompt = np.random.default_rng(1).integers(5, WORDS, 12).tolist() * 2
    texts, steps = [], []
    for guesses in (False, True):
        geometry = geometry_of(exported.caches, 2, 128, WORDS)
        executor = InProcess(exported.graph.path, geometry, Session(threads=1))
        executor.can_speculate = guesses
        loop = DecodeLoop(executor, SchedulerLimits(100, 64))
        request = Asked(prompt, 90)
        loop.submit(request.sequences)
        loop.run_until_idle()
        texts.append(request.tokens)
        steps.append((loop.stats.steps, loop.stats.guessed_tokens))
    assert texts[0] == texts[1]
    assert steps[0][1] == 0
    assert steps[1][1] > 0, "there was something to guess"

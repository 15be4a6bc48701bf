"""Sampling equals transformers' logits processors, and keeps its guarantees about seeds and bans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

from builder.runtime.generation import sampling
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import EXAMINED_TOKENS, Sampler, _filter, choose, most_probable

FILTERS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_p": 0.02},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8, "temperature": 0.7},
    {"temperature": 1.7, "top_p": 0.95},
    {"epsilon_cutoff": 1e-3},
    {"eta_cutoff": 2e-3},
    {"top_p": 0.9, "epsilon_cutoff": 2e-3, "eta_cutoff": 0.01},
    {"min_p": 0.02, "typical_p": 0.9, "eta_cutoff": 0.05, "temperature": 0.8},
    {"top_k": 50, "epsilon_cutoff": 0.01},
    {"top_k": EXAMINED_TOKENS + 900, "top_p": 0.9},
    {"top_k": EXAMINED_TOKENS + 900, "epsilon_cutoff": 8e-4},
    {"typical_p": 0.3, "epsilon_cutoff": 0.4},  # the best token is not typical, and no other reaches the cutoff
    {"typical_p": 0.3, "eta_cutoff": 0.99},
]


def transformers_probabilities(scores: np.ndarray, options: RequestOptions) -> np.ndarray:
    values, ids = torch.from_numpy(scores), torch.zeros((len(scores), 1), dtype=torch.long)
    chain: list[Any] = []
    if options.temperature != 1:
        chain.append(reference.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        chain.append(reference.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(reference.TopPLogitsWarper(options.top_p))
    if options.min_p:
        chain.append(reference.MinPLogitsWarper(options.min_p))
    if options.typical_p < 1:
        chain.append(reference.TypicalLogitsWarper(options.typical_p))
    if options.epsilon_cutoff:
        chain.append(reference.EpsilonLogitsWarper(options.epsilon_cutoff))
    if options.eta_cutoff:
        chain.append(reference.EtaLogitsWarper(options.eta_cutoff))
    for processor in chain:
        values = processor(ids, values)
    return torch.softmax(values.double(), dim=-1).numpy()


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_equal_those_of_transformers(options: dict[str, Any], spread: float) -> None:
    vocabulary = 3 * EXAMINED_TOKENS
    scores = np.random.default_rng(0).normal(0, spread, (3, vocabulary)).astype(np.float32)
    chosen = RequestOptions(**options)
    order, allowed = _filter(scores / np.float32(chosen.temperature), [chosen] * 3, vocabulary)
    actual = np.zeros_like(allowed)
    np.put_along_axis(actual, np.asarray(order), allowed, axis=-1)
    np.testing.assert_allclose(actual, transformers_probabilities(scores, chosen), atol=1e-6)


@pytest.mark.parametrize("spread", [0.5, 6.0])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filtering_the_best_first_changes_no_choice(options: dict[str, Any], spread: float) -> None:
    """Flat and peaked distributions over more tokens than the first candidates give the same draws as over all."""
    vocabulary = 4 * EXAMINED_TOKENS
    scores = np.random.default_rng(1).normal(0, spread, (4, vocabulary)).astype(np.float32)
    samplers = [Sampler(Rules(RequestOptions(random_seed=seed, **options))) for seed in range(4)]
    drawn = [choice.token for choice in choose(scores, samplers)]
    for row, sampler in enumerate(samplers):
        uniform = Sampler(sampler.rules).random.random()
        order, allowed = _filter(
            scores[row : row + 1] / np.float32(sampler.options.temperature), [sampler.options], vocabulary
        )
        position = int(np.searchsorted(np.cumsum(allowed[0]), uniform * allowed[0].sum(), side="right"))
        assert drawn[row] == np.asarray(order)[0, position]


def test_large_top_k_of_one_row_does_not_slow_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(5).normal(0, 6, (4, 4 * EXAMINED_TOKENS)).astype(np.float32)
    options: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 2 * EXAMINED_TOKENS, "top_p": 0.9}, {"top_k": 40}, {}]
    sizes = []

    def counted(rows: np.ndarray, filtered: list[RequestOptions], size: int) -> Any:
        sizes.append((len(rows), size))
        return _filter(rows, filtered, size)

    monkeypatch.setattr(sampling, "_filter", counted)
    rows = [Sampler(Rules(RequestOptions(random_seed=7, **stated))) for stated in options]
    tokens = [choice.token for choice in choose(scores, rows)]
    assert sizes == [(2, EXAMINED_TOKENS), (1, 2 * EXAMINED_TOKENS)]
    for row, stated in enumerate(options):
        alone = Sampler(Rules(RequestOptions(random_seed=7, **stated)))
        assert [choice.token for choice in choose(scores[row : row + 1], [alone])] == [tokens[row]]


def test_penalties_equal_those_of_transformers() -> None:
    scores = np.random.default_rng(2).normal(0, 2, (1, 100)).astype(np.float32)
    prompt, generated = [3, 4, 5, 5], [7, 8, 8]
    options = RequestOptions(temperature=0.0, repetition_penalty=1.7)
    sampler = Sampler(Rules(options), prompt=prompt, generated=list(generated))
    wanted = reference.RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([[*prompt, *generated]]), torch.from_numpy(scores)
    )
    assert choose(scores, [sampler])[0].token == int(wanted.argmax())
    counted = Sampler(
        Rules(RequestOptions(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0)), generated=[9, 9, 11]
    )
    flat = np.zeros((1, 20), np.float32)
    flat[0, 9], flat[0, 11], flat[0, 3] = 4.9, 2.5, 0.1  # 9 loses 1 + 2 x 2, 11 loses 1 + 2
    assert choose(flat, [counted])[0].token == 3


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    sampler = Sampler(Rules(RequestOptions(random_seed=3)))
    counts = Counter(choose(logits, [sampler])[0].token for _ in range(4000))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_seeded_tokens_do_not_depend_on_the_batch() -> None:
    generator = np.random.default_rng(4)
    logits = generator.normal(0, 1, (30, 1, 2000)).astype(np.float32)

    def tokens(others: int, **options: Any) -> list[int]:
        mine = Sampler(Rules(RequestOptions(random_seed=11, **options)))
        mates = [Sampler(Rules(RequestOptions(random_seed=seed, top_p=0.5 + seed / 100))) for seed in range(others)]
        result = []
        for step in logits:
            rows = np.concatenate([generator.normal(0, 1, (others, 2000)).astype(np.float32), step])
            result.append(choose(rows, [*mates, mine])[-1].token)
        return result

    for options in ({}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.01}, {"typical_p": 0.9}):
        assert tokens(0, **options) == tokens(7, **options)
    assert tokens(0) != [choose(s, [Sampler(Rules(RequestOptions(random_seed=12)))])[0].token for s in logits]


def test_streams_of_one_request_differ() -> None:
    logits = np.zeros((1, 5000), np.float32)
    draws = {
        choose(logits, [Sampler(Rules(RequestOptions(random_seed=1)), stream=index)])[0].token for index in range(8)
    }
    assert len(draws) > 4


def test_banned_words_and_biases_are_applied() -> None:
    logits = np.array([[5.0, 4.0, 3.0, 2.0]], np.float32)

    def sampled(generated: list[int], options: RequestOptions, **more: Any) -> int:
        return choose(logits, [Sampler(Rules(options, **more), generated=generated)])[0].token

    greedy = RequestOptions(temperature=0.0)
    assert sampled([], greedy, bad_words=((0,),)) == 1
    assert sampled([2], greedy, bad_words=((2, 0),)) == 1, "the word would be complete"
    assert sampled([3], greedy, bad_words=((2, 0),)) == 0
    assert sampled([], RequestOptions(temperature=0.0, logit_bias={3: 10.0})) == 3
    assert sampled([], RequestOptions(temperature=0.0, min_tokens=2), ends=(0,)) == 1
    assert sampled([1, 1], RequestOptions(temperature=0.0, min_tokens=2), ends=(0,)) == 0
    assert logits.tolist() == [[5.0, 4.0, 3.0, 2.0]], "the engine's logits are not changed"


def test_log_probabilities_equal_pytorchs() -> None:
    logits = np.random.default_rng(5).normal(0, 2, (2, 300)).astype(np.float32)
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    samplers = [
        Sampler(Rules(RequestOptions(temperature=0.0, logprobs=3))),
        Sampler(Rules(RequestOptions(temperature=0.0))),
    ]
    with_them, without = choose(logits, samplers)
    assert without.logprob is None
    assert with_them.logprob == pytest.approx(wanted[0].max(), abs=1e-5)
    best = np.argsort(-wanted[0])[:3]
    assert [token for token, _ in with_them.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in with_them.top], wanted[0][best], atol=1e-5)


@pytest.mark.parametrize("size", [7, 100, 5000, 40_000])
def test_most_probable_equals_a_stable_sort(size: int) -> None:
    generator = np.random.default_rng(size)
    for logits in (generator.normal(size=size), generator.integers(0, 9, size), np.zeros(size)):
        row = logits.astype(np.float32)
        row[generator.integers(0, size, size // 10)] = -np.inf
        for count in (1, 5, 20):
            expected = np.argsort(-row, kind="stable")[:count]
            expected = expected[np.isfinite(row[expected])]  # banned tokens are not among them
            np.testing.assert_array_equal(most_probable(row, count), expected)


def test_many_banned_words_and_biases_act_as_each_alone() -> None:
    generator = np.random.default_rng(0)
    words = tuple(tuple(generator.integers(0, 30, int(generator.integers(1, 4))).tolist()) for _ in range(1000))
    bias = {int(token): float(value) for token, value in enumerate(generator.normal(0, 5, 200))}
    rules = Rules(RequestOptions(logit_bias=bias), bad_words=words)
    generated = generator.integers(0, 30, 12).tolist()
    scores = generator.normal(size=200).astype(np.float32)
    expected = np.array([np.float32(score + bias[token]) for token, score in enumerate(scores)], np.float32)
    for word in words:
        if tuple(generated[len(generated) - len(word) + 1 :] if len(word) > 1 else ()) == word[:-1]:
            expected[word[-1]] = -np.inf
    rules.apply(scores, generated[:3], generated[3:])
    np.testing.assert_array_equal(scores, expected)

from __future__ import annotations

import itertools

import numpy as np
import pytest

from builder.runtime.cutting import cut


def _cost(calls: list[list[int]], lengths: list[int], call_cost: int) -> int:
    return sum(len(call) * max(lengths[i] for i in call) + call_cost for call in calls)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_once_within_the_limits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 300, size=int(generator.integers(1, 80))).tolist()
    calls = cut(lengths, token_budget=1024, max_rows=16, call_cost=32)
    assert sorted(itertools.chain(*calls)) == list(range(len(lengths)))
    for call in calls:
        assert len(call) <= 16
        assert len(call) == 1 or len(call) * max(lengths[i] for i in call) <= 1024


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert cut([5, 4000, 6], token_budget=100, max_rows=8, call_cost=1) == [[0, 2], [1]]


def test_no_rows_make_no_calls() -> None:
    assert cut([], token_budget=100, max_rows=8, call_cost=1) == []


def test_cheaper_than_any_other_partition_of_the_sorted_rows() -> None:
    lengths = [3, 90, 8, 41, 40, 5, 88, 7]
    found = cut(lengths, token_budget=400, max_rows=8, call_cost=20)
    order = np.argsort(lengths, kind="stable").tolist()
    best = min(
        _cost(calls, lengths, 20)
        for bits in itertools.product((False, True), repeat=len(order) - 1)
        for calls in [_split(order, bits)]
        if all(len(call) * max(lengths[i] for i in call) <= 400 for call in calls)
    )
    assert _cost(found, lengths, 20) == best


def _split(order: list[int], bits: tuple[bool, ...]) -> list[list[int]]:
    calls = [[order[0]]]
    for index, new in zip(order[1:], bits, strict=True):
        if new:
            calls.append([index])
        else:
            calls[-1].append(index)
    return calls


def test_padding_stays_below_a_tenth_on_mixed_lengths() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.6, 0.8, size=64), 8, 256).astype(int).tolist()
    calls = cut(lengths, token_budget=2048, max_rows=64, call_cost=32)
    padded = sum(len(call) * max(lengths[i] for i in call) for call in calls)
    assert 1 - sum(lengths) / padded < 0.1

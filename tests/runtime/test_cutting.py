from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from builder.engines import graph_engine, profiles
from builder.runtime.contract import Batching
from builder.runtime.encoder.cutting import cut, cut_sharing, smallest_bucket

OPENVINO = graph_engine("openvino")


def _cost(calls: list[list[int]], lengths: list[int], call_cost: int) -> int:
    return sum(len(call) * max(lengths[i] for i in call) + call_cost for call in calls)


@pytest.mark.parametrize("seed", range(20))
def test_cut_covers_each_row_once_within_the_limits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 300, size=int(generator.integers(1, 80))).tolist()
    calls = cut(lengths, Batching(1024, 16, 32))
    assert sorted(itertools.chain(*calls)) == list(range(len(lengths)))
    for call in calls:
        assert len(call) <= 16
        assert len(call) == 1 or len(call) * max(lengths[i] for i in call) <= 1024


def test_cut_gives_a_row_beyond_the_budget_its_own_call() -> None:
    assert cut([5, 4000, 6], Batching(100, 8, 1)) == [[0, 2], [1]]


def test_cut_of_no_rows_is_empty() -> None:
    assert cut([], Batching(100, 8, 1)) == []


def test_cut_is_the_cheapest_partition_of_the_sorted_rows() -> None:
    lengths = [3, 90, 8, 41, 40, 5, 88, 7]
    cuts = cut(lengths, Batching(400, 8, 20))
    order = np.argsort(lengths, kind="stable").tolist()
    best = min(
        _cost(calls, lengths, 20)
        for bits in itertools.product((False, True), repeat=len(order) - 1)
        for calls in [_split(order, bits)]
        if all(len(call) * max(lengths[i] for i in call) <= 400 for call in calls)
    )
    assert _cost(cuts, lengths, 20) == best


def test_cut_costs_calls_as_padded_to_buckets() -> None:
    """Seven rows are padded to eight, five to six: cheapest as 4 of 10 tokens, padded to 16, and 1 padded to 12."""
    buckets = OPENVINO.buckets(8, 64, 256)
    assert {count for count, _ in buckets} == {1, 2, 3, 4, 6, 8}
    assert {length for count, length in buckets if count > 1} == {8, 16, 24, 32, 40, 48, 56, 64}
    assert [len(call) for call in cut([10] * 5, Batching(256, 8, 8, buckets))] == [1, 4]
    whole = [len(call) for call in cut([10] * 5, Batching(256, 8, 40, buckets))]
    assert whole == [5], "another call costs more than a row"
    generator = np.random.default_rng(1)
    for _ in range(10):
        texts = generator.integers(1, 65, size=int(generator.integers(1, 40))).tolist()
        calls = cut(texts, Batching(256, 8, 4, buckets))
        assert sorted(itertools.chain(*calls)) == list(range(len(texts)))
        for call in calls:
            assert smallest_bucket((len(call), max(texts[i] for i in call)), buckets) in buckets


def test_row_alone_is_padded_in_finer_steps_and_cut_by_them() -> None:
    buckets = OPENVINO.buckets(8, 512, 2048)
    texts = np.random.default_rng(0).integers(1, 129, size=500).tolist()
    shapes = [smallest_bucket((1, length), buckets) for length in texts]
    assert {rows for rows, _ in shapes} == {1}
    assert max(padded - length for (_, padded), length in zip(shapes, texts, strict=True)) == 3
    assert smallest_bucket((2, 20), buckets) == (2, 24)
    two_calls = 2 * 20 - 2 * 24  # tokens more than one call of two rows
    assert [len(cut([20, 20], Batching(2048, 8, cost, buckets))) for cost in (-two_calls - 1, -two_calls + 1)] == [2, 1]


@pytest.mark.parametrize("max_rows", [1, 2, 8])
@pytest.mark.parametrize("budget", [300, 512, 520, 544, 600])
def test_cut_makes_no_call_without_a_bucket(budget: int, max_rows: int) -> None:
    """Regression: two rows shared a call if they were longer than all buckets of several rows and within the budget."""
    captured = profiles.buckets(profiles.Calls(max_rows, 300, budget))
    sizes = itertools.product(range(1, max_rows + 1), range(8, 301, 4))
    former = sorted((size for size in sizes if size[0] == 1 or size[0] * size[1] <= budget), key=np.prod)
    for buckets in (OPENVINO.buckets(max_rows, 300, budget), captured, former):
        for length in range(1, 301):
            texts = [length] * 3 + [max(1, length - 5)]
            for call in cut(texts, Batching(budget, max_rows, 32, buckets)):
                assert smallest_bucket((len(call), max(texts[i] for i in call)), buckets) in buckets


def test_buckets_are_few_and_grow_in_small_steps() -> None:
    shapes = OPENVINO.buckets(64, 512, 2048)
    assert len(shapes) < 250
    assert len([length for count, length in shapes if count == 1]) == 64
    lengths = sorted({length for count, length in shapes if count > 1})
    assert lengths[-1] == 512
    assert all(after <= before * 1.25 for before, after in itertools.pairwise(lengths) if before >= 32)
    assert (1, 512) in OPENVINO.buckets(64, 512, 256), "a single row always has one"
    assert OPENVINO.buckets(5, 20, 100) == tuple(sorted(OPENVINO.buckets(5, 20, 100), key=lambda s: (s[0] * s[1], s)))
    assert max(length for _, length in OPENVINO.buckets(5, 20, 100)) == 20


def _split(order: list[int], bits: tuple[bool, ...]) -> list[list[int]]:
    calls = [[order[0]]]
    for index, new in zip(order[1:], bits, strict=True):
        if new:
            calls.append([index])
        else:
            calls[-1].append(index)
    return calls


def test_cut_pads_mixed_lengths_by_less_than_a_tenth() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3.6, 0.8, size=64), 8, 256).astype(int).tolist()
    calls = cut(lengths, Batching(2048, 64, 32))
    padded = sum(len(call) * max(lengths[i] for i in call) for call in calls)
    assert 1 - sum(lengths) / padded < 0.1


SHARING = Batching(2048, 64, 16, shares_prefixes=True)


def _ranked(documents: int, common: int, lengths: tuple[int, int], seed: int) -> list[list[int]]:
    """Return rows of random tokens that have their first `common` tokens in common, and as many more as `lengths`."""
    chance = np.random.default_rng(seed)
    beginning = chance.integers(1, 1000, common).tolist()
    return [beginning + chance.integers(1, 1000, chance.integers(*lengths)).tolist() for _ in range(documents)]


def _cut_sharing(rows: list[list[int]], batching: Batching) -> list[list[int]]:
    longest = max(map(len, rows))
    return cut_sharing(np.array([row + [-1] * (longest - len(row)) for row in rows]), batching)


def _counted(rows: list[list[int]]) -> float:
    """Return the tokens of a call by brute force: each distinct beginning once, and a part of all others."""
    distinct = len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    return distinct + SHARING.skipped_cost * (len(rows) * max(map(len, rows)) - distinct)


def test_documents_of_a_query_are_one_call_where_beginnings_are_shared() -> None:
    rows = _ranked(20, 75, (55, 56), seed=0)
    assert len(cut([len(row) for row in rows], Batching(2048, 64, 16))) == 2
    assert [sorted(call) for call in _cut_sharing(rows, SHARING)] == [list(range(20))]


def test_documents_of_two_queries_over_the_budget_are_cut_by_query() -> None:
    both = zip(_ranked(20, 75, (55, 56), seed=0), _ranked(20, 75, (55, 56), seed=1), strict=True)
    rows = [row for pair in both for row in pair]
    assert sorted(sorted(call) for call in _cut_sharing(rows, SHARING)) == [[*range(0, 40, 2)], [*range(1, 40, 2)]]


@pytest.mark.parametrize("seed", range(20))
def test_shared_beginnings_count_once_within_the_budget(seed: int) -> None:
    """Several queries in random order, some of their documents equal or the beginning of others."""
    chance = np.random.default_rng(seed)
    rows = [row for query in range(4) for row in _ranked(9, int(chance.integers(1, 30)), (0, 30), 10 * seed + query)]
    rows = [rows[index] for index in chance.permutation(len(rows))]
    calls = _cut_sharing(rows, Batching(100, 8, 4, shares_prefixes=True))
    assert sorted(itertools.chain(*calls)) == list(range(len(rows)))
    for call in calls:
        assert len(call) <= 8
        assert len(call) == 1 or _counted([rows[index] for index in call]) <= 100


def test_calls_with_shared_beginnings_have_buckets() -> None:
    batching = Batching(256, 16, 4, shares_prefixes=True)
    buckets = OPENVINO.buckets(16, 64, batching.padded_budget)
    rows = _ranked(16, 40, (1, 24), seed=0)
    calls = _cut_sharing(rows, replace(batching, buckets=buckets))
    shapes = [(len(call), max(len(rows[index]) for index in call)) for call in calls]
    assert max(count * length for count, length in shapes) > batching.token_budget
    assert all(smallest_bucket(shape, buckets) in buckets for shape in shapes)

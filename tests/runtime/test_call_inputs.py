"""Check the inputs of an encoder's calls: which part of a row each takes, padding, buckets, warm-up."""

from __future__ import annotations

from typing import Any, cast

from tokenizers import Encoding

from builder.runtime.contract import Batching
from builder.runtime.encoder.call_inputs import CallInputs, sources
from builder.runtime.encoder.task import Row
from builder.runtime.encoder.windows import Window
from tests.servings import encoder_serving

NAMES = ("input_ids", "attention_mask", "positions")


def _inputs(buckets: list[list[int]], **changes: Any) -> CallInputs:
    batching = Batching(token_budget=64, max_rows=8, call_cost=4, buckets=buckets)
    return CallInputs(encoder_serving(inputs=sources(NAMES), pad={"input_ids": 9}, batching=batching, **changes))


def _row(ids: list[int], positions: list[int]) -> Row:
    encoding = Window(ids, [0] * len(ids), [1] * len(ids), 1.0)
    return Row(cast(Encoding, encoding), 0, feeds={"positions": positions})


def test_inputs_are_padded_to_their_own_longest_row() -> None:
    found, _ = _inputs([]).of([_row([5, 6, 7], [1]), _row([5], [0, 0])])
    assert {name: array.tolist() for name, array in found.items()} == {
        "input_ids": [[5, 6, 7], [5, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "positions": [[1, 0], [0, 0]],
    }


def test_bucket_adds_tokens_and_rows_but_no_task_columns() -> None:
    found, shape = _inputs([[2, 4]]).of([_row([5, 6, 7], [1])])
    assert shape == (2, 4)
    assert {name: array.tolist() for name, array in found.items()} == {
        "input_ids": [[5, 6, 7, 9]] * 2,
        "attention_mask": [[1, 1, 1, 0]] * 2,
        "positions": [[1]] * 2,
    }


def test_warm_up_repeats_tokens_to_the_length_of_each_bucket() -> None:
    row = {"input_ids": [5, 6], "attention_mask": [1, 1], "positions": [1]}
    calls = list(_inputs([[1, 3], [2, 3]], warm_up=[row]).warm_up())
    assert [call["input_ids"].tolist() for call in calls] == [[[5, 6]], [[5, 6, 5]]]
    assert [call["positions"].tolist() for call in calls] == [[[1]], [[1]]]

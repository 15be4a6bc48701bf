"""Cut a batch of rows of unequal length into engine calls with little padding.

Knows lengths; knows nothing about texts, tensors or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cut(
    lengths: Sequence[int],
    token_budget: int,
    max_rows: int,
    call_cost: int,
    buckets: "Sequence[Sequence[int]]" = (),
) -> list[list[int]]:
    """Partition row indices into engine calls of least total cost.

    Rows are sorted by length; a call on rows of longest length L costs `rows * L + call_cost`, in tokens, where
    `call_cost` is what a call costs besides its tokens. The cheapest partition of the sorted rows into runs is found by
    dynamic programming, O(n * max_rows). A call holds at most `max_rows` rows and at most `token_budget` padded tokens,
    except that a single row is always allowed. With `buckets`, each (rows, tokens of a row), rows and L are rounded up
    to those of the next bucket.
    """
    order = np.argsort(np.asarray(lengths, dtype=np.int64), kind="stable")
    ordered = _round_up(np.asarray(lengths, dtype=np.int64)[order], [tokens for _, tokens in buckets])
    n = len(order)
    padded = _round_up(np.arange(max_rows + 1), [rows for rows, _ in buckets])
    cost = np.zeros(n + 1)
    start_of = np.zeros(n + 1, dtype=np.int64)
    for end, length in enumerate(ordered.tolist(), 1):
        longest = max(length, 1)
        limit = max(1, min(max_rows, token_budget // longest, end))
        tokens = padded[limit:0:-1] * longest  # of calls of `limit` rows, one less, ..., one
        costs = cost[end - limit : end] + tokens
        if buckets and limit > 1:
            costs[:-1][tokens[:-1] > token_budget] = np.inf
        best = int(costs.argmin())
        cost[end], start_of[end] = costs[best] + call_cost, end - limit + best
    calls = []
    end = n
    while end:
        start = int(start_of[end])
        calls.append(order[start:end].tolist())
        end = start
    return calls[::-1]


def _round_up(values: np.ndarray, steps: "Sequence[int]") -> np.ndarray:
    """Round each of `values` up to the next of `steps`; values above the last step stay."""
    ordered = np.unique(np.asarray(steps, dtype=np.int64))
    places = np.searchsorted(ordered, values)
    return np.where(places < len(ordered), np.append(ordered, 0)[places], values)


def smallest_bucket(call: "tuple[int, int]", buckets: "Sequence[Sequence[int]]") -> "tuple[int, int]":
    """Return the smallest bucket, (rows, tokens of a row), into which `call` fits; `call` itself if there is none.

    A CUDA graph runs only on the shape that it was captured on, and OpenVINO prepares itself for each new shape.
    `buckets` are sorted by size.
    """
    for rows, length in buckets:
        if rows >= call[0] and length >= call[1]:
            return rows, length
    return call

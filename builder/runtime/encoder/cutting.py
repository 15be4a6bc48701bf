"""Cut a batch of rows of unequal length into engine calls with little padding.

Knows lengths and token ids; knows nothing about texts or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import Batching


def cut(lengths: Sequence[int], batching: Batching) -> list[list[int]]:
    """Partition row indices into engine calls of least total cost.

    Rows are sorted by length; a call on rows of longest length L costs `rows * L + call_cost`, in tokens, where
    `call_cost` is what a call costs besides its tokens. The cheapest partition of the sorted rows into runs is found by
    dynamic programming, O(n * max_rows). A call holds at most `max_rows` rows and at most `token_budget` padded tokens,
    except that a single row is always allowed. With `buckets`, each (rows, tokens of a row), rows and L are rounded up
    to those of the next bucket; a row alone may have other lengths than several.
    """
    every = np.asarray(lengths, dtype=np.int64)
    return _cheapest(np.argsort(every, kind="stable"), every, batching)[1]


def cut_sharing(ids: np.ndarray, batching: Batching) -> list[list[int]]:
    """Partition rows as `cut` does, for an engine that computes equal beginnings of rows once, and no padding.

    A token that it skips costs `skipped_cost`, in the sum and in the budget. `ids`: (rows, longest), padded with -1. Of
    two orders the cheaper is taken: by length, and by token ids, where rows that begin alike are neighbours. A row
    shares with the one before it in the call, so a call's tokens are never counted too low.
    """
    lengths = (ids >= 0).sum(axis=1)
    partitions = []
    for order in (np.argsort(lengths, kind="stable"), np.lexsort(ids.T[::-1])):
        ordered, own = ids[order], lengths.copy()
        differs = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
        own[order[1:]] -= np.minimum((~differs).sum(axis=1), own[order[1:]])
        partitions.append(_cheapest(order, lengths, batching, own))
    return min(partitions, key=lambda partition: partition[0])[1]


def _cheapest(
    order: np.ndarray, lengths: np.ndarray, batching: Batching, own: "np.ndarray | None" = None
) -> tuple[float, list[list[int]]]:
    """Return the least cost of the rows in this order, by length unless `own` is given, and their calls.

    `own`: the tokens of each row without those that it has in common with the one before it in the order.
    """
    n, budget, padded_budget = len(order), batching.token_budget, batching.padded_budget
    alone = _round_up(lengths[order], [tokens for rows, tokens in batching.buckets if rows == 1])
    together = [tokens for rows, tokens in batching.buckets if rows > 1]
    if batching.buckets:
        together.append(padded_budget + 1)  # a row longer than the buckets of several rows shares no call
    ordered = np.maximum(_round_up(lengths[order], together), 1)
    rows = _round_up(np.arange(batching.max_rows + 1), [rows for rows, _ in batching.buckets])
    if own is not None:
        total, shared = np.append(0, np.cumsum(own[order])), (lengths - own)[order]
    cost = np.zeros(n + 1)
    start_of = np.zeros(n + 1, dtype=np.int64)
    for end, length in enumerate(ordered.tolist(), 1):
        start = end - max(1, min(batching.max_rows, padded_budget // length, end))
        tokens = rows[end - start : 0 : -1] * length  # of calls from `start` on, from the row after it on, ...
        tokens[-1] = alone[end - 1]
        if own is not None:
            padded = rows[end - start : 0 : -1] * np.maximum.accumulate(ordered[start:end][::-1])[::-1]
            padded[-1] = alone[end - 1]
            computed = total[end] - total[start:end] + shared[start:end]
            tokens = computed + batching.skipped_cost * (padded - computed)
        costs = cost[start:end] + tokens
        costs[:-1][tokens[:-1] > budget] = np.inf
        best = int(costs.argmin())
        cost[end], start_of[end] = costs[best] + batching.call_cost, start + best
    calls = []
    end = n
    while end:
        start = int(start_of[end])
        calls.append(order[start:end].tolist())
        end = start
    return float(cost[n]), calls[::-1]


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

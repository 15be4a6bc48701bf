"""What a choice among tokens needs of their scores: the highest, and the logarithm of the sum of exponentials.

Knows arrays; knows nothing about beams, samplers or rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GROUPS = 512  # of tokens, whose maxima are looked at first
SMALL = 32  # exponentials of scores no further from zero neither overflow nor lose what counts


def log_sum_exp(row: np.ndarray, room: np.ndarray) -> np.float32:
    """The logarithm of the sum of exponentials of (vocabulary,) float32. `room`: one more, which is written over.

    Zero where all are -inf: they stay so when it is taken away, and -inf would make them NaN.
    """
    best = row.max()
    if best == -np.inf:
        return np.float32(0)
    shift = np.float32(0) if abs(best) < SMALL else best
    np.exp(np.subtract(row, shift, out=room) if shift else row, out=room)
    total: np.float32 = shift + np.log(np.add.reduce(room))
    return total


def highest(
    rows: "Sequence[np.ndarray]", totals: np.ndarray, scores: np.ndarray, count: int
) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """The `count` tokens of all `rows`, (vocabulary,) each, with the highest row[token] - total + score.

    `totals`, `scores`: one of each row. Returns row, token and that value of each, best first; of equal ones the lower
    row first, of one row what was higher before it was rounded to that value, and then the lower token. What is
    forbidden, -inf, is never among them, so there may be fewer.

    Each lies in one of the `count` groups of tokens with the highest maxima, so only those are looked into.
    """
    size = min(GROUPS, len(rows[0]))
    maxima = np.array([_maxima(row, size) for row in rows])
    beams, groups = np.divmod(_reaching(maxima - totals[:, None] + scores[:, None], count), size)
    if not len(beams):
        return beams, groups, np.zeros(0, np.float32)
    members = [rows[row][group::size] for row, group in zip(beams.tolist(), groups.tolist())]
    sizes = [len(values) for values in members]
    owners = np.repeat(beams, sizes)
    logits = np.concatenate(members)
    values = logits - totals[owners] + scores[owners]
    inside = _reaching(values, count)
    tokens = np.concatenate([np.arange(group, len(rows[0]), size) for group in groups.tolist()])[inside]
    return _best(owners[inside], tokens, values[inside], logits[inside], count)


def best_of(
    values: np.ndarray, logits: np.ndarray, tokens: np.ndarray, count: int
) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """The `count` highest of `values`, (rows, tokens), as `highest` returns them.

    `logits`: what they were made of; `tokens`: which they are of.
    """
    owners = np.repeat(np.arange(len(values)), values.shape[1])
    inside = values.ravel() > -np.inf
    return _best(owners[inside], tokens.ravel()[inside], values.ravel()[inside], logits.ravel()[inside], count)


def _best(
    owners: np.ndarray, tokens: np.ndarray, values: np.ndarray, logits: np.ndarray, count: int
) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    order = np.lexsort((tokens, -logits, owners, -values))[:count]
    return owners[order], tokens[order], values[order]


def _maxima(row: np.ndarray, size: int) -> np.ndarray:
    """The highest of each group of (vocabulary,): every `size`-th token is of one group."""
    whole = len(row) // size * size
    maxima: np.ndarray = row[:whole].reshape(-1, size).max(axis=0)
    rest = row[whole:]
    np.maximum(maxima[: len(rest)], rest, out=maxima[: len(rest)])
    return maxima


def _reaching(values: np.ndarray, count: int) -> np.ndarray:
    """The places of what may be among the `count` highest: all that are not below these, and not forbidden."""
    flat = values.ravel()
    least = np.partition(flat, flat.size - count)[flat.size - count] if count < flat.size else -np.inf
    return np.flatnonzero((flat >= least) & (flat > -np.inf))

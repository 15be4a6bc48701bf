"""Select the highest scores and compute log-sum-exp, for choosing among tokens.

Knows arrays; knows nothing about beams, samplers or rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GROUPS = 512  # groups of tokens, whose maxima are compared first
SAFE_EXPONENT = 32  # exponentials of scores no further from zero neither overflow nor lose precision that matters


def log_sum_exp(row: np.ndarray, scratch: np.ndarray) -> np.float32:
    """Return the log of the sum of exponentials of `row`, (vocabulary,) float32; `scratch`: memory of the same shape.

    Zero if all are -inf: subtracting it leaves them -inf, while subtracting -inf would make them NaN.
    """
    best = row.max()
    if best == -np.inf:
        return np.float32(0)
    shift = np.float32(0) if abs(best) < SAFE_EXPONENT else best
    np.exp(np.subtract(row, shift, out=scratch) if shift else row, out=scratch)
    total: np.float32 = shift + np.log(np.add.reduce(scratch))
    return total


def highest(
    rows: "Sequence[np.ndarray]", totals: np.ndarray, scores: np.ndarray, count: int
) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Return the `count` tokens of all `rows`, (vocabulary,) each, with the highest row[token] - total + score.

    `totals`, `scores`: one for each row. Returns row, token and that value of each, best first. Ties go to the lower
    row, then, within a row, to the token that was higher before rounding to that value, and then to the lower token.
    Banned tokens, -inf, are left out, so there may be fewer.

    Each result lies in one of the `count` groups of tokens with the highest maxima, so only those are searched.
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
    """Return the `count` highest of `values`, (rows, tokens), in the form of `highest`.

    `logits`: the values before rounding, for ties; `tokens`: the token of each value.
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
    """Return the maximum of each group of a (vocabulary,): every `size`-th token belongs to the same group."""
    whole = len(row) // size * size
    maxima: np.ndarray = row[:whole].reshape(-1, size).max(axis=0)
    rest = row[whole:]
    np.maximum(maxima[: len(rest)], rest, out=maxima[: len(rest)])
    return maxima


def _reaching(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places of all values that may be among the `count` highest: not below these, and not -inf."""
    flat = values.ravel()
    least = np.partition(flat, flat.size - count)[flat.size - count] if count < flat.size else -np.inf
    return np.flatnonzero((flat >= least) & (flat > -np.inf))

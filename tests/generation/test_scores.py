"""Selection of the highest scores, by every method."""

from __future__ import annotations

import numpy as np
import pytest

from builder.runtime.generation.scores import highest, log_sum_exp


def sorted_through(rows: np.ndarray, totals: np.ndarray, scores: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Return the same by a full sort."""
    values = (rows - totals[:, None] + scores[:, None]).ravel()
    order = np.lexsort((-rows.ravel(), np.arange(rows.size) // rows.shape[1], -values))[:count]
    places = [index for index in order if values[index] > -np.inf]
    return [divmod(int(index), rows.shape[1]) for index in places]


@pytest.mark.parametrize("size", [1, 50, 1024, 5000, 70_000])
@pytest.mark.parametrize("beams", [1, 5])
def test_highest_selects_across_rows(size: int, beams: int) -> None:
    """The scores all differ, are mostly equal, or are nearly all forbidden."""
    generator = np.random.default_rng(size)
    rows = generator.normal(size=(beams, size)).astype(np.float32)
    equal = generator.integers(0, 3, rows.shape).astype(np.float32)
    at_the_end = rows + np.where(np.arange(size) > size - 40, 9, 0).astype(np.float32)
    forbidden = np.where(generator.random(rows.shape) < 0.9999, np.float32(-np.inf), rows)
    totals, scores = (generator.normal(size=beams).astype(np.float32) for _ in range(2))
    nothing = np.zeros(beams, np.float32)
    for values, taken, added in (
        (rows, totals, scores),
        (at_the_end, totals, scores),
        (equal, nothing, nothing),
        (forbidden, totals, scores),
        (np.full_like(rows, -np.inf), totals, scores),
    ):
        for count in (1, 8, 33):
            rows_found, tokens, best = highest(list(values), taken, added, count)
            assert list(zip(rows_found.tolist(), tokens.tolist(), strict=True)) == sorted_through(
                values, taken, added, count
            )
            np.testing.assert_array_equal(best, values[rows_found, tokens] - taken[rows_found] + added[rows_found])


@pytest.mark.parametrize("best", [-1000, -40, -31, 0, 31, 40, 1000])
def test_log_sum_exp_is_exact_for_scores_of_any_size(best: float) -> None:
    """Scores have any size, and many scores far below the best count too."""
    row = np.full(70_000, best - 12, np.float32)
    row[::9] = best - 200
    row[7] = best
    before = row.copy()
    exact = best + np.log(np.exp(before.astype(np.float64) - best).sum())
    assert log_sum_exp(row, np.empty_like(row)) == pytest.approx(exact, abs=1e-5 if abs(best) < 100 else 1e-4)
    np.testing.assert_array_equal(row, before, "only the room is written over")


def test_banned_row_stays_banned_beside_others() -> None:
    """For example a beam without an allowed token, whose scores are normalised again."""
    rows = [np.full(2000, -np.inf, np.float32), np.linspace(0, 1, 2000, dtype=np.float32)]
    totals = np.array([log_sum_exp(row, np.empty_like(row)) for row in rows])
    rows_found, tokens, _ = highest(rows, totals, np.zeros(2, np.float32), 2)
    assert rows_found.tolist() == [1, 1]
    assert tokens.tolist() == [1999, 1998]

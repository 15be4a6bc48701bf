"""The comparison behind every parity check detects every difference."""

from __future__ import annotations

import math
from typing import Any

import pytest

from builder.checkpoints.distances import difference


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        ({"a": 1.0}, {"a": 1.0, "more": 2}, 0.0),
        ({"a": 0.5}, {"a": 0.25}, 0.25),
        ({"a": 200.0}, {"a": 201.0}, 0.005),
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ('[{"score": 0.5}]', '[{"score": 0.75}]', 0.25),
        ("same", "same", 0.0),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ("one", "two", math.inf),
        ('["one"]', '["two"]', math.inf),
        (True, 1.0, 0.0),
        (True, False, math.inf),
        ({"label": ["x"]}, {"label": ["y"]}, math.inf),
        (None, 0.0, math.inf),
    ],
)
def test_difference(expected: Any, actual: Any, error: float) -> None:
    assert difference(expected, actual)[0] == pytest.approx(error)


def test_difference_names_the_place() -> None:
    assert difference({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]})[1] == "answer.a[0].b: 'x' became 'y'"
    assert difference({"a": [1.0, 5.0]}, {"a": [1.0, 6.0]})[1] == "answer.a[1]"


def test_difference_of_nan_is_infinite() -> None:
    error, where = difference({"a": [1.0, math.nan, 2.0], "b": 3.0}, {"a": [1.0, 1.0, 2.0], "b": 3.5})
    assert error == math.inf
    assert where == "answer.a[1]: nan became 1.0"

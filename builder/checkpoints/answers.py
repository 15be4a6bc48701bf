"""Difference of two answers: numbers may differ, everything else must be equal.

Values are Python's; a str that contains JSON is compared by its JSON value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def difference(expected: Any, actual: Any, path: str = "answer") -> tuple[float, str]:
    """Return the largest difference and where it is; infinite if something other than a number differs.

    Numbers are compared relative to the larger of 1 and the expected size.
    """
    if isinstance(expected, str) and isinstance(actual, str) and expected != actual:
        try:
            return difference(json.loads(expected), json.loads(actual), path)
        except ValueError:
            return float("inf"), f"{path}: {expected!r} became {actual!r}"
    if isinstance(expected, Mapping) and isinstance(actual, Mapping) and set(expected) <= set(actual):
        parts = [difference(value, actual[key], f"{path}.{key}") for key, value in expected.items()]
        return max(parts, default=(0.0, path))
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)) and len(expected) == len(actual):
        parts = [difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(expected, actual, strict=True))]
        return max(parts, default=(0.0, path))
    if _is_number(expected) and _is_number(actual):
        error = abs(expected - actual) / max(1.0, abs(expected))
        return (error, path) if not math.isnan(error) else (math.inf, f"{path}: {expected} became {actual}")
    if expected == actual:
        return 0.0, path
    return float("inf"), f"{path}: {str(expected)[:80]!r} became {str(actual)[:80]!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""Values are converted to tensors without a change of meaning, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.common.errors import SpecError
from builder.common.tensors import to_tensors
from builder.runtime.fields import Field

FIELDS = tuple(
    Field(name, f"TYPE_{kind}", (-1,), True)
    for name, kind in {"text": "STRING", "top_k": "INT32", "seed": "INT64", "top_p": "FP32", "stream": "BOOL"}.items()
)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"text": ["a", b"\xff", 5]}, [b"a", b"\xff", b"5"]),
        ({"top_k": ["7", np.int64(8)]}, [7, 8]),
        ({"top_k": [3.0, np.float32(4)]}, [3, 4]),
        ({"seed": 2**40}, [2**40]),
        ({"top_p": ["0.5", 1]}, [0.5, 1.0]),
        ({"stream": [True, "false", "1", 0]}, [True, False, True, False]),
    ],
)
def test_to_tensors_converts_compatible_values(sample: dict[str, Any], expected: list[Any]) -> None:
    (tensor,) = to_tensors(sample, FIELDS, batched=False).values()
    assert tensor.tolist() == expected


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": None}, "text is None; expected STRING"),
        ({"text": [{"role": "user"}]}, "text is .*; expected STRING"),
        ({"text": "\ud800"}, "expected STRING"),
        ({"top_k": 3.7}, "top_k is 3.7; expected INT32"),
        ({"top_k": "3.7"}, "top_k is '3.7'; expected INT32"),
        ({"top_k": 2**32 + 1}, "top_k is 4294967297; expected INT32"),
        ({"seed": 2**64}, "expected INT64"),
        ({"top_k": True}, "top_k is True; expected INT32"),
        ({"top_p": "much"}, "top_p is 'much'; expected FP32"),
        ({"top_p": 1e39}, "expected FP32"),
        ({"stream": "ture"}, "stream is 'ture'; expected BOOL"),
        ({"stream": "yes"}, "stream is 'yes'; expected BOOL"),
    ],
)
def test_to_tensors_refuses_incompatible_values(sample: dict[str, Any], message: str) -> None:
    """Regression: each was silently converted to another value, such as None, False, 3 or 1, or raised a traceback."""
    with pytest.raises(SpecError, match=message):
        to_tensors(sample, FIELDS)

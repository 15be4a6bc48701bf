"""Conversion between Python values and the front model's tensors; the same for builds, queries and load tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from builder.common.errors import SpecError
from builder.runtime.fields import Field

NUMPY_TYPES: dict[str, Any] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_STRING": np.object_,
}
WIRE_TYPES: Mapping[str, str] = {  # of config.pbtxt -> of a request
    "TYPE_STRING": "BYTES",
    "TYPE_BOOL": "BOOL",
    "TYPE_INT32": "INT32",
    "TYPE_INT64": "INT64",
    "TYPE_UINT32": "UINT32",
    "TYPE_UINT64": "UINT64",
    "TYPE_FP32": "FP32",
}
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def to_tensors(sample: Mapping[str, Any], fields: Sequence[Field], batched: bool = True) -> dict[str, np.ndarray]:
    """Return one sample as tensors, with a batch dimension of 1 if `batched`; str becomes UTF-8 bytes.

    Raises SpecError.
    """
    known = {field.name: field for field in fields}
    unknown = set(sample) - set(known)
    if unknown:
        raise SpecError(f"{min(unknown)!r} is not an input of this model; it has {', '.join(known)}")
    missing = [field.name for field in fields if not field.optional and field.name not in sample]
    if missing:
        raise SpecError(f"{missing[0]} is missing; this model needs it")
    tensors = {}
    for name, value in sample.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        dtype = NUMPY_TYPES[known[name].data_type]
        try:
            values = [_converted(item, dtype) for item in values]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SpecError(f"{name} is {value!r}; expected {known[name].data_type.removeprefix('TYPE_')}") from error
        tensors[name] = np.array([values] if batched else values, dtype=dtype)
    return tensors


def _converted(item: Any, dtype: Any) -> Any:
    """Return a value as numpy takes it for `dtype`.

    Raises KeyError, TypeError, ValueError or OverflowError for another kind of value, which numpy would cut, wrap
    around or write down as Python does.
    """
    if dtype is np.object_:
        if item is None or isinstance(item, (dict, list)):
            raise TypeError
        return item if isinstance(item, bytes) else str(item).encode("utf-8")
    if dtype is np.bool_:
        return BOOLEANS[str(item).lower()]
    if isinstance(item, bool):
        raise TypeError
    if np.issubdtype(dtype, np.integer):
        whole = isinstance(item, str) or (isinstance(item, (float, np.floating)) and item.is_integer())  # pandas' 3
        number, limits = int(item) if whole else index(item), np.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            raise OverflowError
        return number
    if math.isfinite(real := float(item)) and abs(real) > np.finfo(dtype).max:
        raise OverflowError
    return real


def to_values(tensors: Mapping[str, np.ndarray], fields: Sequence[Field]) -> list[dict[str, Any]]:
    """Return output tensors as Python values, one mapping per row; a dimension of exactly 1 becomes a scalar."""
    scalar = {field.name for field in fields if tuple(field.dims) == (1,)}
    rows = len(next(iter(tensors.values())))
    answers = []
    for row in range(rows):
        answer: dict[str, Any] = {}
        for name, array in tensors.items():
            values = _decoded(array[row].tolist())
            answer[name] = values[0] if name in scalar else values
        answers.append(answer)
    return answers


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value

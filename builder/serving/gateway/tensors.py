"""Convert JSON values to and from the bytes of Triton's tensors, in raw_input_contents and raw_output_contents.

Source: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/README.html
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from builder.common.tensors import WIRE_TYPES
from builder.runtime.fields import Field
from builder.serving.gateway.errors import bad_field

LENGTH = struct.Struct("<I")
ARRAYS: Mapping[str, Any] = {
    "BOOL": np.dtype(np.bool_),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP32": np.dtype("<f4"),
}


def refuse_count(field: Field, values: Sequence[Any]) -> None:
    """Raise ApiError if `field` does not take this number of values, before Triton sees them."""
    size = None if -1 in field.dims else math.prod(field.dims)
    if not values or len(values) != (size or len(values)):
        expected = "at least one" if size is None else "one" if size == 1 else str(size)
        raise bad_field(field.name, f"{field.name} has {len(values)} values; expected {expected}")


def add_tensor(
    request: service_pb2.ModelInferRequest, field: Field, values: Sequence[Any], shape: Sequence[int]
) -> None:
    """Add `values`, of JSON, to a request as the input `field`. Raises ApiError for a value of another type."""
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = field.name, WIRE_TYPES[field.data_type]
    tensor.shape.extend(shape)
    is_text = tensor.datatype == "BYTES"
    data = _strings(field.name, values) if is_text else _numbers(field.name, values, ARRAYS[tensor.datatype])
    request.raw_input_contents.append(data)


@dataclass(frozen=True)
class Output:
    """One output tensor in its wire format, decoded on demand."""

    datatype: str
    shape: tuple[int, ...]
    raw: bytes

    def strings(self) -> list[str]:
        """Return the strings of a BYTES tensor, flat; a length precedes each."""
        texts, raw, at = [], self.raw, 0
        while at < len(raw):
            (size,) = LENGTH.unpack_from(raw, at)
            at += LENGTH.size + size
            texts.append(raw[at - size : at].decode("utf-8", "replace"))
        return texts

    def array(self) -> np.ndarray:
        """Return the tensor as a numpy array; strings become objects."""
        if self.datatype == "BYTES":
            return np.array(self.strings(), dtype=np.object_).reshape(self.shape)
        return np.frombuffer(self.raw, ARRAYS[self.datatype]).reshape(self.shape)


Outputs = Mapping[str, Output]


def read_outputs(response: service_pb2.ModelInferResponse) -> dict[str, Output]:
    """Return the outputs of a response by name."""
    return {
        output.name: Output(output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _strings(name: str, values: Sequence[Any]) -> bytes:
    packed = []
    for value in values:
        if not isinstance(value, str):
            raise bad_field(name, f"{name} is {_shortened(value)}; expected text")
        try:
            data = value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise bad_field(name, f"{name}: character {error.start} is half of one; send both") from error
        packed += [LENGTH.pack(len(data)), data]
    return b"".join(packed)


def _numbers(name: str, values: Sequence[Any], dtype: np.dtype) -> bytes:
    is_valid: Callable[[Any], bool]
    if dtype.kind == "b":
        expected, is_valid = "true or false", lambda value: isinstance(value, bool)
    elif dtype.kind == "f":
        expected, is_valid = "a number", lambda value: type(value) in (int, float) and abs(value) < 3.4e38
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        expected, is_valid = f"{low} to {high}", lambda value: type(value) is int and low <= value <= high
    for value in values:
        if not is_valid(value):
            raise bad_field(name, f"{name} is {_shortened(value)}; expected {expected}")
    return np.array(values, dtype).tobytes()


def _shortened(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:80]}..."

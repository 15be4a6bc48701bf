"""Converts JSON values to and from the bytes of Triton's tensors, in raw_input_contents and raw_output_contents.

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

from builder.common.tensors import WIRE
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
WHOLE = ("TYPE_INT32", "TYPE_INT64", "TYPE_UINT32", "TYPE_UINT64")


def refuse_count(field: Field, values: Sequence[Any]) -> None:
    """Raise ApiError if `field` does not take this number of values, before Triton sees them."""
    wanted = None if -1 in field.dims else math.prod(field.dims)
    if not values or len(values) != (wanted or len(values)):
        expected = "at least one" if wanted is None else "one" if wanted == 1 else str(wanted)
        raise bad_field(field.name, f"{field.name} has {len(values)} values; expected {expected}")


def add_tensor(
    request: service_pb2.ModelInferRequest, field: Field, values: Sequence[Any], shape: Sequence[int]
) -> None:
    """Add `values`, of JSON, to a request as the input `field`. Raises ApiError for a value of another type."""
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = field.name, WIRE[field.data_type]
    tensor.shape.extend(shape)
    request.raw_input_contents.append(_PACK[field.data_type](field.name, values))


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
            raise bad_field(name, f"{name} is {_shown(value)}; expected text")
        try:
            data = value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise bad_field(name, f"{name}: character {error.start} is half of one; send both") from error
        packed += [LENGTH.pack(len(data)), data]
    return b"".join(packed)


def _whole(kind: str) -> Callable[[str, Sequence[Any]], bytes]:
    limits = np.iinfo(ARRAYS[WIRE[kind]])

    def pack(name: str, values: Sequence[Any]) -> bytes:
        for value in values:
            if type(value) is not int or not limits.min <= value <= limits.max:
                raise bad_field(name, f"{name} is {_shown(value)}; expected {limits.min} to {limits.max}")
        return np.array(values, ARRAYS[WIRE[kind]]).tobytes()

    return pack


def _real(name: str, values: Sequence[Any]) -> bytes:
    for value in values:
        if type(value) not in (int, float) or not abs(value) < 3.4e38 or not math.isfinite(value):
            raise bad_field(name, f"{name} is {_shown(value)}; expected a number")
    return np.array(values, np.dtype("<f4")).tobytes()


def _flags(name: str, values: Sequence[Any]) -> bytes:
    for value in values:
        if not isinstance(value, bool):
            raise bad_field(name, f"{name} is {_shown(value)}; expected true or false")
    return np.array(values, np.bool_).tobytes()


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


_PACK: Mapping[str, Callable[[str, Sequence[Any]], bytes]] = {
    "TYPE_STRING": _strings,
    **{kind: _whole(kind) for kind in WHOLE},
    "TYPE_FP32": _real,
    "TYPE_BOOL": _flags,
}

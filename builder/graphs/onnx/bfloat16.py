"""bf16 in ONNX: rounding to it. numpy has no such type. Knows tensors."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper


def bfloat16(values: np.ndarray, name: str) -> TensorProto:
    """Return `values`, fp32, as a bf16 tensor, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return helper.make_tensor(name, TensorProto.BFLOAT16, values.shape, rounded.astype(np.uint16).tobytes(), raw=True)

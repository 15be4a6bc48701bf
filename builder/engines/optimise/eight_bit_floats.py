"""fp8: static int8 with its integers made floats of 8 bits, E4M3, whose steps are finer near zero.

The ranges are those measured for int8: the largest value, 127 steps, becomes 448, the largest of E4M3 ("FP8 Formats
for Deep Learning", Micikevicius et al. 2022). Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.graphs.onnx.weights import values_of

LARGEST = 448.0
QUANTISED = "_quantized"  # suffix that ONNX Runtime's quantiser appends to the name of a weight


def to_float8(graph: onnx.GraphProto, weights: Mapping[str, TensorProto]) -> None:
    """Make every symmetric int8 pair of `graph` one of fp8; `weights`: the matrices before they were rounded."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    rescaled: set[str] = set()
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        values, scale, zero = node.input
        if scale not in rescaled:
            rescaled.add(scale)
            steps = numpy_helper.to_array(tensors[scale]) * np.float32(127 / LARGEST)
            tensors[scale].CopyFrom(numpy_helper.from_array(steps, scale))
            shape = tuple(tensors[zero].dims)
            tensors[zero].CopyFrom(_float8(np.zeros(shape, np.float32), zero))
        if values in tensors:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            steps = numpy_helper.to_array(tensors[scale])
            steps = np.expand_dims(steps, 1 - axis) if steps.ndim else steps
            tensors[values].CopyFrom(_float8(values_of(weights[values.removesuffix(QUANTISED)]) / steps, values))


def _float8(values: np.ndarray, name: str) -> TensorProto:
    """Return `values` rounded to E4M3, cut at its largest."""
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)
    content = np.clip(values, -LARGEST, LARGEST).astype(dtype).tobytes()
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, values.shape, content, raw=True)

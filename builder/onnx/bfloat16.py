"""bf16 in ONNX: rounding to it, and graphs without it. numpy has no such type. Knows tensors and graphs."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def bfloat16(values: np.ndarray, name: str) -> TensorProto:
    """`values`, fp32, as a bf16 tensor, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return helper.make_tensor(name, TensorProto.BFLOAT16, values.shape, rounded.astype(np.uint16).tobytes(), raw=True)


def without_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with fp32 for bf16, constants as they were rounded: what runs where no kernel has bf16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            bits = np.frombuffer(tensor.raw_data, np.uint16).astype(np.uint32) << 16
            tensor.CopyFrom(numpy_helper.from_array(bits.view(np.float32).reshape(tuple(tensor.dims)), tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.BFLOAT16:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float32)))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    return model

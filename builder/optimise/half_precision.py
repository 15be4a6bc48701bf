"""fp16 and bf16: real constants in half the bytes; products in them where the engine has them, fp32 where it does not.

ONNX Runtime's own converter, which leaves in fp32 the operators that lose too much in fp16. On a CPU fp16 saves
memory, not time. Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from builder.errors import VerificationError
from builder.export.bfloat16 import bfloat16
from builder.export.graph import Graph, save_graph

HALVES = ("fp16", "bf16")


def to_half(graph: Graph, path: Path, precision: str = "fp16", kept: Collection[str] = ()) -> Graph:
    """Write `graph` in fp16 or bf16 to `path`; its inputs and outputs stay as they are, and operators of `kept`.

    Raises VerificationError where nothing changed.
    """
    original = onnx.load(str(graph.path))
    exact = {tensor.name: tensor for tensor in original.graph.initializer} if precision == "bf16" else {}
    exact = {name: TensorProto.FromString(tensor.SerializeToString()) for name, tensor in exact.items()}
    model = convert_float_to_float16(
        original, keep_io_types=True, disable_shape_infer=True, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *kept]
    )
    if not any(tensor.data_type == TensorProto.FLOAT16 for tensor in model.graph.initializer):
        raise VerificationError("no constant became fp16; nothing was published. Use --precision fp32")
    if precision == "bf16":
        _as_bfloat16(model.graph, exact)
    return replace(save_graph(model, path), arithmetic="bf16" if precision == "bf16" else graph.arithmetic)


def _as_bfloat16(graph: onnx.GraphProto, exact: dict[str, TensorProto]) -> None:
    """Every fp16 of `graph` as bf16; constants from what they were in fp32, which fp16 may have cut."""
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            values = numpy_helper.to_array(exact.get(tensor.name, tensor)).astype(np.float32)
            tensor.CopyFrom(bfloat16(values, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT16:
                values = numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(bfloat16(values, attribute.t.name))
    for value in graph.value_info:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16

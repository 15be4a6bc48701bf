"""A GPU's half precision on a CPU: fp32, rounded to fp16 or bf16 where the graph says so.

ONNX Runtime's CPU provider has no kernels for bf16, and next to none for fp16: it puts casts to fp32 around each
operator and takes them away again between two of them, so that nothing is rounded and nothing is too large for fp16,
whose largest number is 65504 (insert_cast_transformer.cc: "InsertedPrecisionFreeCast_"). Casts that a graph brings with
it stay. Knows graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.graphs.onnx.nodes import cast_type, replace_nodes
from builder.graphs.onnx.operators import CACHED_ATTENTION

SINGLE = TensorProto.FLOAT
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
REAL = (SINGLE, *HALVES)
# Operators that pass numbers on unchanged, or whose result is not a number.
HANDED_ON = frozenset({
    "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity",
    "Max", "Min", "Neg", "Abs", "Clip", "Relu", "Reshape", "ScatterElements",
    "ScatterND", "Slice", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
WHOLE = frozenset({  # operators whose results are integers or booleans
    "And", "ArgMax", "ArgMin", "DynamicQuantizeLinear", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
    "LessOrEqual", "MatMulInteger", "NonZero", "Not", "Or", "QuantizeLinear", "Shape", "Size", "Xor",
})  # fmt: skip
CACHED = {CACHED_ATTENTION: 1}  # outputs that count; those after them are the cache, whose numbers came rounded


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` in fp32, with constants rounded as they were and each result rounded to its half precision."""
    kinds = _kinds(model.graph)
    nodes = [new for node in model.graph.node for new in _rounded(node, kinds)]
    for tensor in model.graph.initializer:
        if tensor.data_type in HALVES:
            tensor.CopyFrom(_single(tensor))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type in HALVES:
            value.type.tensor_type.elem_type = SINGLE
    replace_nodes(model.graph, nodes)
    return model


def _rounded(node: onnx.NodeProto, kinds: dict[str, int]) -> Iterator[onnx.NodeProto]:
    """Yield `node` in fp32 and, where its results were in half precision, the casts that round them."""
    cast = cast_type(node)
    if cast is not None and cast in HALVES:
        yield from _through(cast, node.input[0], node.output[0])
        return
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in HALVES:
            attribute.t.CopyFrom(_single(attribute.t))
    halves = [] if node.op_type in HANDED_ON else [name for name in node.output if kinds.get(name) in HALVES]
    halves = halves[: CACHED.get(node.op_type)]
    for index, name in enumerate(node.output):
        if name in halves:
            node.output[index] = f"{name}.exact"
    yield node
    for name in halves:
        yield from _through(kinds[name], f"{name}.exact", name)


def _through(half: int, name: str, rounded: str) -> Iterator[onnx.NodeProto]:
    yield helper.make_node("Cast", [name], [f"{rounded}.half"], name=f"Half.{rounded}", to=half)
    yield helper.make_node("Cast", [f"{rounded}.half"], [rounded], name=f"Single.{rounded}", to=SINGLE)


def _kinds(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the type of each tensor: the declared one, or that of the first real number that its node takes."""
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        kinds[value.name] = value.type.tensor_type.elem_type
    for node in graph.node:
        taken = [kinds[name] for name in node.input if kinds.get(name) in REAL]
        cast = cast_type(node)
        for name in filter(None, node.output[: 1 if node.op_type == "TopK" else None]):
            if cast is not None:
                kinds[name] = cast
            elif taken and node.op_type not in WHOLE and not kinds.get(name):
                kinds[name] = taken[0]
    return kinds


def _single(tensor: TensorProto) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)

"""fp16 and bf16: real constants in half the bytes; products in them where the engine has them, fp32 where it does not.

ONNX Runtime's own converter, which leaves in fp32 the operators that lose too much in fp16. On a CPU fp16 saves
memory, not time. Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from builder.common.errors import VerificationError
from builder.graphs.onnx.graph import Graph, load_whole, save_graph
from builder.graphs.onnx.nodes import cast_type, in_order, replace_nodes

HALVES = ("fp16", "bf16")
BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
SQUARING = ("Pow", "ReduceMean")  # of normalisations that are not fused: the square of 256 exceeds fp16
NARROWED, WIDENED = "_cast_to_fp16_node", "_cast_to_fp32_node"  # suffixes of the converter's casts
ANGLES = ("Sin", "Cos")  # of rotary positions: fp16 counts positions in twos from 2048 on, bf16 from 256 on
MAX_FP16 = 65504.0  # of fp16
WHOLE = (TensorProto.INT32, TensorProto.INT64)  # rounded to a place in a table, such as one of relative positions


def to_half(
    graph: Graph,
    path: Path,
    precision: str = "fp16",
    in_float: Collection[str] = (),
    real: Collection[str] | None = None,
) -> Graph:
    """Write `graph` in fp16 or bf16 to `path`, except for operators of `in_float`.

    Its inputs and outputs stay as they are; where `real` names some, those alone.

    Raises VerificationError if nothing changed.
    """
    original = load_whole(graph.path)
    exact = {tensor.name: tensor for tensor in original.graph.initializer} if precision == "bf16" else {}
    exact = {name: TensorProto.FromString(tensor.SerializeToString()) for name, tensor in exact.items()}
    model = convert_float_to_float16(
        original,
        keep_io_types=True if real is None else list(real),
        disable_shape_infer=True,
        node_block_list=_nodes_in_fp32(original.graph),
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, *SQUARING, *in_float],
    )
    if not any(tensor.data_type == TensorProto.FLOAT16 for tensor in model.graph.initializer):
        raise VerificationError("no constant became fp16; nothing was published. Use --precision fp32")
    _join_real(model.graph)
    _bound_both_sides(model.graph)
    if precision == "bf16":
        _as_bfloat16(model.graph, exact)
    return save_graph(model, path)


def _bound_both_sides(graph: onnx.GraphProto) -> None:
    """Give every Clip in fp16 both bounds: without the upper one ONNX Runtime 1.19 answers 0 (its issue 21957)."""
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in list(graph.node):
        bounds = [*node.input, "", ""][:3]
        if node.op_type != "Clip" or all(bounds[1:]):
            continue
        if TensorProto.FLOAT16 not in [constants.get(name) for name in bounds[1:]]:
            continue
        for index, (name, bound) in enumerate((("least", -MAX_FP16), ("largest", MAX_FP16)), start=1):
            if not bounds[index]:
                bounds[index] = f"{node.output[0]}_{name}"
                graph.initializer.append(numpy_helper.from_array(np.array(bound, np.float16), bounds[index]))
        node.ClearField("input")
        node.input.extend(bounds)


def _join_real(graph: onnx.GraphProto) -> None:
    """Let tensors that stay in fp32 be passed on in fp32: the converter casts to fp16 and back between any two nodes.

    It also makes a tensor's cast once for each node that takes it, all of one name.
    """
    narrowed = {node.output[0]: node.input[0] for node in graph.node if _casts(node, NARROWED, TensorProto.FLOAT16)}
    nodes, real = {}, {}
    for node in graph.node:
        if _casts(node, WIDENED, TensorProto.FLOAT) and node.input[0] in narrowed:
            real[node.output[0]] = narrowed[node.input[0]]
        else:
            nodes[tuple(node.output)] = node
    for node in nodes.values():
        for index, name in enumerate(node.input):
            node.input[index] = real.get(name, name)
    used = {name for node in nodes.values() for name in node.input} | {value.name for value in graph.output}
    rest = [node for node in nodes.values() if node.output[0] not in narrowed or node.output[0] in used]
    replace_nodes(graph, in_order(rest))


def _casts(node: onnx.NodeProto, suffix: str, to: int) -> bool:
    """Return True if `node` is a cast that the converter put in."""
    return node.name.endswith(suffix) and cast_type(node) == to


def _nodes_in_fp32(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes that must stay in fp32.

    Those take sines and cosines or round to whole numbers, or lead to such nodes.
    """
    maker = {output: node for node in graph.node for output in node.output}
    exact: dict[str, None] = {}
    pending = [n for n in graph.node if n.op_type in ANGLES or cast_type(n) in WHOLE]
    while pending:
        node = pending.pop()
        if node.name not in exact:
            exact[node.name] = None
            pending.extend(maker[name] for name in node.input if name in maker)
    return list(exact)


def _as_bfloat16(graph: onnx.GraphProto, exact: dict[str, TensorProto]) -> None:
    """Turn every fp16 of `graph` into bf16; constants from what they were in fp32, which fp16 may have cut."""
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            values = numpy_helper.to_array(exact.get(tensor.name, tensor)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(BFLOAT16), tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT16:
                values = numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(numpy_helper.from_array(values.astype(BFLOAT16), attribute.t.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16

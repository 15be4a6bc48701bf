"""Attention of prompts over an int8 cache, computed in fp32.

With many tokens a call, ONNX Runtime's kernel over such a cache takes about three times the processor time of the fp32
kernel (docs/benchmarks/generation.md). So a long call converts a layer's codes once, and attends to them in fp32. The
scales of keys move into the queries and those of values into the answer, because the codes themselves are exact in
fp32. Knows nodes; knows nothing about quality.

Operators: ONNX Runtime's GroupQueryAttention (docs/ContribOperators.md), ONNX's TensorScatter (opset 24), which writes
in place because its input and its output are bound to the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.common.memory import CONVERTED_COPIES, MAX_CONVERTED_BYTES
from builder.graphs.onnx.nodes import add_constant, attributes_of, constant, copy_of, replace_nodes
from builder.graphs.onnx.operators import CACHED_ATTENTION, STANDARD

OPSET = 24  # the first with TensorScatter
MIN_NEW_TOKENS = 32  # tokens a row of a call: more than the steps of a decode loop have, guessed ones included
IS_LONG = "attends_in_fp32"
ONE, ZERO_POINT = "cache_one", "cache_zero_point"  # the scale and the zero point of codes
START, POSITIONS = "cache_start", "cache_positions"  # the first position, and the axis of positions
QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS = range(6)  # places among the operator's inputs
QUANTISATION = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


def attend_prompts_in_fp32(model: onnx.ModelProto) -> None:
    """Replace each attention over an int8 cache with a choice by the number of new tokens.

    `model` has at least one. The last two inputs of each are the scales of keys and values, one constant a channel,
    (heads x size). New keys and values may be columns of the query's tensor.
    """
    graph = model.graph
    add_constant(graph, ONE, np.ones((), np.float32))
    add_constant(graph, ZERO_POINT, np.zeros((), np.int8))
    add_constant(graph, START, np.zeros(1, np.int32))  # int32 as the total length, to slice the cache
    add_constant(graph, POSITIONS, np.full(1, 2, np.int32))
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    widest = max(tensors[node.input[-1]].dims[0] for node in graph.node if _reads_codes(node))
    nodes = [_by_length(graph, node, tensors) if _reads_codes(node) else node for node in graph.node]
    replace_nodes(graph, [*_is_long(MAX_CONVERTED_BYTES // (CONVERTED_COPIES * 4 * widest)), *nodes])
    for entry in model.opset_import:
        if entry.domain in STANDARD:
            entry.version = max(entry.version, OPSET)


def _reads_codes(node: onnx.NodeProto) -> bool:
    return node.op_type == CACHED_ATTENTION and "kv_cache_bit_width" in attributes_of(node)


def _is_long(max_positions: int) -> list[onnx.NodeProto]:
    """Return nodes that tell if a call has many new tokens, and its rows no more than `max_positions` together."""
    return [
        helper.make_node("Shape", ["input_ids"], [f"{IS_LONG}.rows"], start=0, end=1),
        helper.make_node("Shape", ["input_ids"], [f"{IS_LONG}.new"], start=1, end=2),
        helper.make_node("Cast", ["total_sequence_length"], [f"{IS_LONG}.total"], to=TensorProto.INT64),
        helper.make_node("Mul", [f"{IS_LONG}.total", f"{IS_LONG}.rows"], [f"{IS_LONG}.converted"]),
        constant(f"{IS_LONG}.least", [MIN_NEW_TOKENS]),
        constant(f"{IS_LONG}.most", [max_positions]),
        helper.make_node("GreaterOrEqual", [f"{IS_LONG}.new", f"{IS_LONG}.least"], [f"{IS_LONG}.many"]),
        helper.make_node("LessOrEqual", [f"{IS_LONG}.converted", f"{IS_LONG}.most"], [f"{IS_LONG}.fits"]),
        helper.make_node("And", [f"{IS_LONG}.many", f"{IS_LONG}.fits"], [IS_LONG]),
    ]


def _by_length(graph: onnx.GraphProto, node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> onnx.NodeProto:
    """Return an If that computes the outputs of `node`, in fp32 for a long call. `tensors`: constants by name."""
    short, long = copy_of(node), _in_fp32(graph, node, tensors)
    outputs = [f"{name}.short" for name in node.output]
    del short.output[:]
    short.output.extend(outputs)
    return helper.make_node(
        "If",
        [IS_LONG],
        list(node.output),
        f"{node.name}.by_length",
        then_branch=_branch(node, long, [f"{name}.long" for name in node.output]),
        else_branch=_branch(node, [short], outputs),
    )


def _branch(node: onnx.NodeProto, nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.GraphProto:
    kinds = (TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT8)
    declared = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(outputs, kinds, strict=True)]
    return helper.make_graph(nodes, f"{node.name}.{outputs[0]}", [], declared)


def _in_fp32(graph: onnx.GraphProto, node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> list[onnx.NodeProto]:
    """Return nodes that compute `node` with fp32 attention, and add their constants to `graph`."""
    attributes = attributes_of(node)
    heads, group = attributes["kv_num_heads"], attributes["num_heads"] // attributes["kv_num_heads"]
    answer, new_keys, new_values = (f"{name}.long" for name in node.output)
    inner = f"{answer}."
    new, nodes = list(node.input[: VALUE + 1]), list[onnx.NodeProto]()
    keys, values = (numpy_helper.to_array(tensors[name]).reshape(heads, -1) for name in node.input[-2:])
    for name, scale in (("of_keys", keys), ("of_values", values)):
        add_constant(graph, f"{inner}{name}.repeated", scale.repeat(group, axis=0).ravel())
        add_constant(graph, f"{inner}{name}.inverse", (1 / scale).ravel())
    if not new[KEY]:
        packed, new = new[QUERY], [f"{inner}{name}.columns" for name in ("queries", "keys", "values")]
        sizes = constant(f"{inner}columns", [group * keys.size, keys.size, values.size])
        nodes += [sizes, helper.make_node("Split", [packed, *sizes.output], new, axis=-1)]
    attention = copy_of(node)
    del attention.input[-2:], attention.output[:]
    for attribute in [one for one in attention.attribute if one.name in QUANTISATION]:
        attention.attribute.remove(attribute)
    attention.input[QUERY] = f"{inner}queries"
    attention.output.extend([f"{inner}in_steps", f"{inner}keys.present", f"{inner}values.present"])
    nodes += [
        constant(f"{inner}one", 1),
        constant(f"{inner}zero", [0]),
        constant(f"{inner}by_head", [0, 0, heads, -1]),
        helper.make_node("Cast", [node.input[LENGTHS]], [f"{inner}last"], to=TensorProto.INT64),
        helper.make_node("Add", [f"{inner}last", f"{inner}one"], [f"{inner}lengths"]),
        helper.make_node("Sub", [f"{inner}lengths", f"{IS_LONG}.new"], [f"{inner}before"]),
        helper.make_node("Max", [f"{inner}before", f"{inner}zero"], [f"{inner}starts"]),  # a first prompt may be padded
        helper.make_node("Mul", [new[QUERY], f"{inner}of_keys.repeated"], [f"{inner}queries"]),
    ]
    for kind, place, past, present in (("keys", KEY, PAST_KEY, new_keys), ("values", VALUE, PAST_VALUE, new_values)):
        nodes += _written(inner, kind, new[place], node.input[past], present)
        attention.input[place], attention.input[past] = f"{inner}{kind}.new", f"{inner}{kind}.past"
    return [
        *nodes,
        attention,
        helper.make_node("Mul", [f"{inner}in_steps", f"{inner}of_values.repeated"], [answer]),
    ]


def _written(inner: str, kind: str, new: str, past: str, present: str) -> list[onnx.NodeProto]:
    """Return nodes that write `new` keys or values into the cache as codes, and give its codes in fp32."""
    side = f"{inner}{kind}"
    steps, codes, by_head, ordered, before = (
        f"{side}.{name}" for name in ("steps", "codes", "by_head", "ordered", "past_codes")
    )
    return [
        helper.make_node("Mul", [new, f"{inner}of_{kind}.inverse"], [steps]),
        helper.make_node("QuantizeLinear", [steps, ONE, ZERO_POINT], [codes]),
        helper.make_node("Reshape", [codes, f"{inner}by_head"], [by_head]),
        helper.make_node("Transpose", [by_head], [ordered], perm=[0, 2, 1, 3]),
        helper.make_node("Slice", [past, START, "total_sequence_length", POSITIONS], [before]),
        helper.make_node("TensorScatter", [past, ordered, f"{inner}starts"], [present], axis=2),
        helper.make_node("Cast", [codes], [f"{side}.new"], to=TensorProto.FLOAT),
        helper.make_node("Cast", [before], [f"{side}.past"], to=TensorProto.FLOAT),
    ]

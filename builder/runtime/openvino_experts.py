"""Translate mixtures of experts to OpenVINO, whose CPU plugin then reads the weights of the chosen experts alone.

The graph's file has ONNX Runtime's operators MoE and QMoE: docs/ContribOperators.md says what they compute. Each pair
of a token and an expert that it chose becomes a row. The rows are sorted by expert, and GroupedMatMul (opset 17)
multiplies those of each expert by its weights. Source of the plugin's side: openvino,
transformations/op_conversions/convert_grouped_matmul_to_gather_matmul.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .open_vino import ConversionExtension, openvino

DOMAIN = "com.microsoft"
ABSENT = "NullNode"  # the type of the node that stands for an input left out

CODES = {4: openvino.Type.u4, 8: openvino.Type.u8}

ops = openvino.opset16

PLAIN = {
    "silu": ops.swish,
    "relu": ops.relu,
    "gelu": lambda values: ops.gelu(values, "tanh"),
    "identity": lambda values: values,
}


@dataclass(frozen=True)
class Routing:
    """Pairs of a token and one of its `chosen` experts, sorted by expert.

    `order`: (pairs,) the place of each sorted pair among the tokens' pairs; `experts`: (pairs,) the expert of each
    sorted pair; `ends`: (experts,) where the pairs of each expert end; `weights`: (tokens, chosen, 1).
    """

    chosen: int
    order: Any
    experts: Any
    ends: Any
    weights: Any

    def spread(self, hidden: Any) -> Any:
        """Return the row of `hidden`, (tokens, inputs), for each sorted pair."""
        return ops.gather(hidden, ops.divide(self.order, np.int32(self.chosen)), np.int32(0))

    def multiply(self, rows: Any, matrices: Any, bias: Any) -> Any:
        """Multiply `rows`, (pairs, inputs), by the matrix of each pair's expert.

        `matrices`: (experts, outputs, inputs); `bias`: (experts, outputs), or None.
        """
        products = openvino.opset17.grouped_matmul(rows, matrices, self.ends)
        return products if bias is None else ops.add(products, ops.gather(bias, self.experts, np.int32(0)))

    def join(self, rows: Any) -> Any:
        """Return for each token the weighted sum, (tokens, outputs), of its `rows`, (pairs, outputs)."""
        places = ops.range(np.int32(0), _length(self.order), np.int32(1), "i32")
        unsorted = ops.gather(rows, ops.scatter_elements_update(places, self.order, places, np.int32(0)), np.int32(0))
        width = rows.get_output_partial_shape(0)[1].get_length()
        pairs = ops.reshape(unsorted, np.array([-1, self.chosen, width]), False)
        return ops.reduce_sum(ops.multiply(pairs, self.weights), np.int32(1))


def expert_extensions() -> "list[ConversionExtension]":
    """Return the translations of MoE and QMoE, for a Core that reads a graph with them."""
    return [
        ConversionExtension("MoE", DOMAIN, _translate),
        ConversionExtension("QMoE", DOMAIN, _translate_quantised),
    ]


def _translate(node: Any) -> "list[Any]":
    """Translate one MoE. Its inputs: hidden states, logits, then weights and bias of both products."""
    hidden, logits, into, into_bias, out_of, out_of_bias = _inputs(node, 6)
    return [_experts(node, hidden, logits, (into, into_bias), (out_of, out_of_bias))]


def _translate_quantised(node: Any) -> "list[Any]":
    """Translate one QMoE. Its inputs: hidden states, logits, codes, scales and bias of both products, zero points."""
    inputs = _inputs(node, 13)
    into = _dequantised(node, inputs[2], inputs[3], inputs[11])
    out_of = _dequantised(node, inputs[5], inputs[6], inputs[12])
    return [_experts(node, inputs[0], inputs[1], (into, inputs[4]), (out_of, inputs[7]))]


def _inputs(node: Any, count: int) -> "list[Any]":
    """Return `count` inputs of `node`, None for those left out."""
    given = [node.get_input(place) for place in range(node.get_input_size())]
    named = [None if value.get_node().get_type_name() == ABSENT else value for value in given]
    return named + [None] * (count - len(named))


def _experts(node: Any, hidden: Any, logits: Any, into: "tuple[Any, Any]", out_of: "tuple[Any, Any]") -> Any:
    routing = _route(logits, int(node.get_attribute("k")), into[0].get_partial_shape()[0].get_length())
    units = routing.multiply(routing.spread(hidden), *into)
    return routing.join(routing.multiply(_activated(node, units), *out_of)).output(0)


def _route(logits: Any, chosen: int, experts: int) -> Routing:
    """Choose the experts of the highest `logits`, (tokens, experts), weighted by the softmax of all logits."""
    best = ops.topk(ops.softmax(logits, -1), np.int32(chosen), -1, "max", "value", "i32")
    pairs = ops.reshape(best.output(1), np.array([-1]), False)
    by_expert = ops.topk(pairs, _length(pairs), 0, "min", "value", "i32")  # a stable sort has pairs^2 comparisons
    ends = ops.search_sorted(by_expert.output(0), ops.constant(np.arange(experts, dtype=np.int32)), right_mode=True)
    weights = ops.unsqueeze(best.output(0), np.int32(-1))
    return Routing(chosen, by_expert.output(1), by_expert.output(0), ends, weights)


def _activated(node: Any, units: Any) -> Any:
    """Return the activation of `units`, (pairs, units); of SwiGLU, gates and linear units take turns."""
    kind = node.get_attribute("activation_type")
    if kind != "swiglu":
        return PLAIN[kind](units)
    halves = ops.split(ops.reshape(units, np.array([0, -1, 2]), True), np.int32(-1), 2)
    gate, linear = (ops.squeeze(half, np.int32(-1)) for half in halves.outputs())
    if node.has_attribute("swiglu_limit"):
        limit = node.get_attribute("swiglu_limit")
        gate, linear = ops.minimum(gate, np.float32(limit)), ops.clamp(linear, -limit, limit)
    gate = ops.swish(gate, np.float32(node.get_attribute("activation_alpha", 1.0)))
    return ops.multiply(gate, ops.add(linear, np.float32(node.get_attribute("activation_beta", 0.0))))


def _dequantised(node: Any, codes: Any, scales: Any, zeros: Any) -> Any:
    """Return matrices, (experts, outputs, inputs), of codes; the plugin stores the codes and multiplies by them.

    `codes`: uint8, (experts, outputs, inputs * bits / 8), the low bits first; `scales`: (experts, outputs, blocks);
    `zeros`: codes of zero by block, packed in the same way, or None for the middle code.
    """
    bits, block = int(node.get_attribute("expert_weight_bits")), int(node.get_attribute("block_size"))
    experts, outputs, blocks = scales.get_partial_shape().to_shape()
    shape = openvino.Shape([experts, outputs, blocks, block])
    stored = codes.get_node().data  # a name, because the tensor does not keep its memory
    steps = ops.constant(openvino.Tensor(stored, shape, CODES[bits]), shared_memory=False)
    if zeros is None:
        middle = np.array(2 ** (bits - 1), np.uint8)
    else:
        middle = _unpacked(zeros.get_node().data, bits)[:, :, :blocks, None]
    steps = ops.subtract(ops.convert(steps, "f32"), ops.convert(ops.constant(middle), "f32"))
    matrices = ops.multiply(steps, ops.unsqueeze(scales, np.int32(-1)))
    return ops.reshape(matrices, np.array([experts, outputs, blocks * block]), False).output(0)


def _unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return one code a byte, of those that `bits` bits hold each along the last axis."""
    parts = [codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*codes.shape[:-1], -1)


def _length(values: Any) -> Any:
    """Return the number, (), of `values`, (count,)."""
    return ops.squeeze(ops.shape_of(values, "i32"), np.int32(0))

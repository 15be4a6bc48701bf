"""Smaller weights for mixtures of experts: QMoE, which multiplies by blocks of 4 or 8 bits of the chosen experts.

Operator: com.microsoft QMoE, as in ONNX Runtime's ContribOperators.md and contrib_ops/cpu/moe/moe_quantization_cpu.cc.
It takes what MoE takes, its weights in codes with a scale for each block of inputs, as MatMulNBits has them, and rounds
activations to 8 bits. Knows nodes; knows nothing about quality.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from builder.checkpoints.grids import SMALLEST_BLOCK, pack
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.experts import INTO, INTO_BIAS, OUT_OF, OUT_OF_BIAS
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, replace_nodes
from builder.graphs.onnx.operators import DOMAIN, EXPERTS, QUANTISED_EXPERTS
from builder.graphs.onnx.weights import values_of
from builder.options import WeightOptions

EIGHT_BIT_ACTIVATIONS = 4  # accuracy_level


def block_of(graph: onnx.GraphProto, largest: int) -> int | None:
    """Return the block of at most `largest` inputs that divides those of all experts in `graph`; None without one."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == EXPERTS]
    inputs = {tensors[node.input[place]].dims[2] for node in nodes for place in (INTO, OUT_OF)}
    size = largest
    while size >= SMALLEST_BLOCK:
        if all(count % size == 0 for count in inputs):
            return size
        size //= 2
    return None


def quantise_experts(graph: Graph, options: WeightOptions, folder: Path) -> Graph | None:
    """Write `graph` into `folder` with its experts in blocks of 8 bits; None if no block divides their inputs.

    `options.block_size`: the largest block.
    """
    model = load_graph(graph.path)
    block = block_of(model.graph, options.block_size)
    if block is None:
        return None
    nodes = [
        quantised_experts(model.graph, node, 8, replace(options, block_size=block)) if node.op_type == EXPERTS else node
        for node in model.graph.node
    ]
    replace_nodes(model.graph, nodes)
    drop_unused(model.graph)
    return save_graph(model, folder / "eight-bit-experts" / graph.path.name)


def quantised_experts(
    graph: onnx.GraphProto, node: onnx.NodeProto, bits: int, options: WeightOptions
) -> onnx.NodeProto:
    """Return QMoE for the MoE `node`, and add its constants to `graph`. The block of `options` divides its inputs."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    inputs = [*node.input[:INTO]]
    zeros = []
    for place, bias in ((INTO, INTO_BIAS), (OUT_OF, OUT_OF_BIAS)):
        name = node.input[place]
        codes, scales, middles = _rounded(values_of(tensors[name]), bits, options)
        add_constant(graph, f"{name}.codes", codes)
        add_constant(graph, f"{name}.scales", scales)
        inputs += [f"{name}.codes", f"{name}.scales", node.input[bias] if len(node.input) > bias else ""]
        if middles is not None:
            add_constant(graph, f"{name}.zeros", middles)
            zeros.append(f"{name}.zeros")
    if zeros:
        inputs += ["", "", "", *zeros]  # a third matrix comes first
    result = helper.make_node(
        QUANTISED_EXPERTS,
        inputs,
        list(node.output),
        node.name,
        domain=DOMAIN,
        expert_weight_bits=bits,
        block_size=options.block_size,
        accuracy_level=EIGHT_BIT_ACTIVATIONS,
    )
    result.attribute.extend(node.attribute)
    return result


def _rounded(
    weights: np.ndarray, bits: int, options: WeightOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return codes, scales and zero points of `weights`, (experts, outputs, inputs); no zero points if symmetric.

    Codes are uint8, (experts, outputs, inputs * bits / 8), the low bits first; scales (experts, outputs, blocks).
    """
    experts, outputs, inputs = weights.shape
    blocks, step_count = inputs // options.block_size, 2**bits - 1
    codes = np.empty((experts, outputs, inputs * bits // 8), np.uint8)
    scales = np.empty((experts, outputs, blocks), np.float32)
    middles = np.empty((experts, outputs, blocks), np.uint8)
    for expert in range(experts):  # so that the intermediate numbers take little memory
        values = np.asarray(weights[expert]).reshape(outputs, blocks, options.block_size)
        low, high = np.minimum(values.min(axis=-1), 0), np.maximum(values.max(axis=-1), 0)
        if options.symmetric:  # the larger end gets the code 0, of which there is one more than on the other side
            middle = np.float32(2 ** (bits - 1))
            scale = np.where(-low >= high, -low, -high) / middle
        else:
            scale = (high - low) / np.float32(step_count)
        scale = np.where(scale == 0, np.float32(1), scale)
        zero = np.full_like(scale, middle) if options.symmetric else np.round(-low / scale)
        code = np.clip(np.round(values / scale[..., None]) + zero[..., None], 0, step_count).astype(np.uint8)
        codes[expert] = pack(code.reshape(outputs, inputs), bits)
        scales[expert], middles[expert] = scale, zero
    return codes, scales, None if options.symmetric else pack(middles, bits)

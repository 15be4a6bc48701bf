"""Smaller weights for a decoder in OpenVINO: what its CPU plugin multiplies as bytes.

`int8`: one scale for each output column, as DequantizeLinear before the product; `int8-weights`, `int4-weights`: blocks
with a scale each, as MatMulNBits. The plugin keeps both small and rounds activations to 8 bits in groups of
`openvino.ACTIVATIONS`, each token's by itself, so that a row's answer does not depend on the rows beside it. Token
embeddings are int8 with a scale a row, and stored once where they are the output matrix too.

Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.export.projections import spell_out_gemms
from builder.onnx.cleanup import drop_unused
from builder.onnx.graph import Graph, save_graph
from builder.onnx.nodes import (
    add_constant,
    constant_products,
    eight_bit_lookup,
    eight_bit_scales,
    replace_nodes,
    store_eight_bit,
)
from builder.optimise.weights import BITS, Quantised, WeightOptions, blockwise, refuse_missed, tied_heads


def quantise_weights(graph: Graph, precision: str, options: WeightOptions, folder: Path) -> Quantised:
    """Write `graph` at `precision` into `folder`. Raises VerificationError where a product was missed."""
    model = onnx.load(str(graph.path))
    spell_out_gemms(model.graph)
    heads = {node.output[0] for node in tied_heads(model.graph)}
    products = {node.output[0] for node in constant_products(model.graph)}
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    embeddings = 0
    for node in model.graph.node:
        if node.output[0] in heads:
            nodes.extend(_by_rows(model.graph, node, values[node.input[1]]))
        elif node.output[0] in products and precision not in BITS:
            nodes.extend(_by_columns(model.graph, node, values[node.input[1]]))
        elif node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in values:
            nodes.extend(eight_bit_lookup(model.graph, node, values[node.input[0]]))
            embeddings += 1
        else:
            nodes.append(node)
    replace_nodes(model.graph, nodes)
    if precision in BITS:
        model = blockwise(model, BITS[precision], options)
    drop_unused(model.graph)
    result = replace(save_graph(model, folder / precision / graph.path.name), engine=graph.engine)
    done = sum(node.op_type == "DequantizeLinear" for node in model.graph.node) + result.operators["MatMulNBits"]
    refuse_missed(len(heads) + len(products), done, model.graph)
    return Quantised(result, done, embeddings)


def _by_columns(graph: onnx.GraphProto, node: onnx.NodeProto, matrix: np.ndarray) -> Iterator[onnx.NodeProto]:
    """MatMul(x, matrix) with a scale a column."""
    source, name = node.input
    yield from _dequantised(graph, name, matrix, axis=0, output=f"{node.output[0]}.matrix")
    yield helper.make_node("MatMul", [source, f"{node.output[0]}.matrix"], list(node.output), name=node.name)


def _by_rows(graph: onnx.GraphProto, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
    """Gemm(x, table, transB) with a scale a row of the table."""
    source, name = node.input
    rows = f"{node.output[0]}.rows"
    yield from _dequantised(graph, name, table, axis=1, output=rows)
    yield helper.make_node("Transpose", [rows], [f"{rows}.turned"], perm=[1, 0])
    yield helper.make_node("MatMul", [source, f"{rows}.turned"], list(node.output), name=node.name)


def _dequantised(
    graph: onnx.GraphProto, name: str, values: np.ndarray, axis: int, output: str
) -> Iterator[onnx.NodeProto]:
    """`values` from bytes, rounded along `axis`: one scale for each place of the other one."""
    store_eight_bit(graph, name, values, axis)
    flat = f"{name}.scale.flat"
    if all(tensor.name != flat for tensor in graph.initializer):
        add_constant(graph, flat, eight_bit_scales(values, axis).ravel())
    yield helper.make_node("DequantizeLinear", [f"{name}.int8", flat], [output], axis=1 - axis)

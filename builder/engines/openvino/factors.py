"""Constant factors of matrix products, for OpenVINO.

OpenVINO 2026.4 multiplies a constant factor of a product of two dimensions into its weights. Weights of 8 or 4 bits
are then stored in 32, and read so at every step. A decoder's only such product is its output matrix. Knows graphs;
knows nothing about models.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import onnx
from onnx import helper

from builder.graphs.onnx.cleanup import known_shapes
from builder.graphs.onnx.nodes import replace_nodes


def scale_inputs(graph: onnx.GraphProto) -> None:
    """Multiply the input of each product of two dimensions by the number by which its result is multiplied."""
    scalings = _scalings(graph)
    replaced = {node.output[0] for node in scalings.values()}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        scaling = scalings.get(node.output[0])
        if scaling is not None:
            source, scaled = node.input[0], f"{node.output[0]}.scaled.input"
            operands = [source if name == node.output[0] else name for name in scaling.input]
            nodes.append(helper.make_node(scaling.op_type, operands, [scaled]))
            node.input[0], node.output[0] = scaled, scaling.output[0]
        if scaling is not None or node.output[0] not in replaced:
            nodes.append(node)
    replace_nodes(graph, nodes)


def _scalings(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return the multiplication or division by a number that alone reads a product, by the name of its result."""
    shapes, sizes = known_shapes(graph), {tensor.name: prod(tensor.dims) for tensor in graph.initializer}
    readers = Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])
    products = {
        node.output[0]
        for node in graph.node
        if node.op_type in ("MatMul", "Gemm")
        and len(node.input) == 2
        and node.input[1] in sizes
        and len(shapes.get(node.input[0], ())) == 2
        and readers[node.output[0]] == 1
    }
    scalings = {}
    for node in graph.node:
        if node.op_type in ("Mul", "Div"):
            source, factor = sorted(node.input, key=sizes.__contains__) if node.op_type == "Mul" else node.input
            if source in products and sizes.get(factor) == 1:
                scalings[source] = node
    return scalings

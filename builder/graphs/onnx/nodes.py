"""Shared parts of the rewrites of a graph: attributes, constants, products, 8-bit rounding, replacement of nodes.

Knows ONNX graphs; knows nothing about quality or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

PIECE = 256  # rows of a matrix that are rounded at once


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the value of each attribute of `node`, by its name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def copy_of(node: onnx.NodeProto) -> onnx.NodeProto:
    return onnx.NodeProto.FromString(node.SerializeToString())


def constant_products(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the MatMul nodes with a constant matrix, in the order in which they run."""
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return [node for node in graph.node if node.op_type == "MatMul" and ranks.get(node.input[1]) == 2]


def add_constant(graph: onnx.GraphProto, name: str, values: np.ndarray) -> None:
    graph.initializer.append(numpy_helper.from_array(values, name))


def constant(name: str, numbers: int | Sequence[int]) -> onnx.NodeProto:
    """Return a node that gives whole numbers, int64. Branches use these, since they contain no tensors."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(numbers, np.int64), name))


def add_constant_once(graph: onnx.GraphProto, name: str, values: np.ndarray) -> None:
    """Add a constant, unless there is one of that name."""
    if all(tensor.name != name for tensor in graph.initializer):
        add_constant(graph, name, values)


def replace_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Make `nodes` the nodes of `graph`, each with a name."""
    for index, node in enumerate(nodes):
        if not node.name:
            node.name = f"{node.op_type}_{index}_{node.output[0]}"
    copies = [copy_of(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def in_order(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return `nodes`, each after those whose outputs it takes, otherwise in their order."""
    maker = {output: index for index, node in enumerate(nodes) for output in node.output if output}
    predecessors = {index: {maker[name] for name in node.input if name in maker} for index, node in enumerate(nodes)}
    return [nodes[index] for index in TopologicalSorter(predecessors).static_order()]


def cast_type(node: onnx.NodeProto) -> int | None:
    """Return the type that a Cast makes; None for another operator."""
    return attributes_of(node)["to"] if node.op_type == "Cast" else None


def eight_bit_scales(values: np.ndarray, axis: int | None, steps: int = 127) -> np.ndarray:
    """Return the step of symmetric rounding to `steps` on each side of zero; 1 for nothing but zeros.

    `axis`: with a step for each slice along it; None: one step for all values.
    """
    largest = np.maximum(values.max(axis=axis, keepdims=True), -values.min(axis=axis, keepdims=True))
    sizes = (largest / steps).astype(np.float32)
    return np.where(sizes < np.finfo(np.float32).tiny, np.float32(1), sizes)


def store_eight_bit(graph: onnx.GraphProto, name: str, values: np.ndarray, axis: int, steps: int = 127) -> None:
    """Store `name`.int8 and `name`.scale, once."""
    if any(tensor.name == f"{name}.int8" for tensor in graph.initializer):
        return
    scales = eight_bit_scales(values, axis, steps)
    add_constant(graph, f"{name}.int8", eight_bits(values, scales))
    add_constant(graph, f"{name}.scale", scales)


def eight_bits(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return `values` in steps of `scales`, int8; in pieces, so that the intermediate floats take little memory."""
    rounded = np.empty(values.shape, np.int8)
    steps = np.broadcast_to(scales, values.shape)
    for start in range(0, len(values), PIECE):
        piece = slice(start, start + PIECE)
        rounded[piece] = np.round(values[piece] / steps[piece])
    return rounded


def eight_bit_lookup(
    graph: onnx.GraphProto, node: onnx.NodeProto, table: np.ndarray, steps: int = 127
) -> list[onnx.NodeProto]:
    """Return nodes for Gather(table, rows) from bytes with a scale per row."""
    (name, rows), output = node.input, node.output[0]
    store_eight_bit(graph, name, table, 1, steps)
    return [
        helper.make_node("Gather", [f"{name}.int8", rows], [f"{output}.int8"]),
        helper.make_node("Cast", [f"{output}.int8"], [f"{output}.cast"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Gather", [f"{name}.scale", rows], [f"{output}.scale"]),
        helper.make_node("Mul", [f"{output}.cast", f"{output}.scale"], [output]),
    ]

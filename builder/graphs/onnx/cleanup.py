"""Removes parts that the exporter leaves in a graph and an engine would run at each call.

Only rewrites that leave every value as it is: nothing here recognises a model.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

Shape = tuple[int | str, ...]


def clean(model: onnx.ModelProto) -> None:
    """Clean the graph in place.

    Drop reshapes that undo one another, name squeezed axes, give normalisations a bias, drop unused nodes and weights.
    """
    graph = model.graph
    shapes = known_shapes(graph)
    _name_squeezed_axes(graph, shapes)
    producers = {output: node for node in graph.node for output in node.output}
    replaced: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "Reshape":
            continue
        previous = producers.get(node.input[0])
        if previous is not None and previous.op_type == "Reshape":
            node.input[0] = previous.input[0]  # only the last of two reshapes in a row decides the shape
        source, target = shapes.get(node.input[0]), shapes.get(node.output[0])
        if source is not None and source == target and node.output[0] not in {o.name for o in graph.output}:
            replaced[node.output[0]] = node.input[0]
    for node in graph.node:
        for place, name in enumerate(node.input):
            while name in replaced:
                name = replaced[name]
            node.input[place] = name
    _give_biases(graph)
    drop_unused(graph)


def _name_squeezed_axes(graph: onnx.GraphProto, shapes: dict[str, Shape]) -> None:
    """Give each Squeeze without axes those that are 1 in every call: otherwise it removes a batch of one row."""
    for node in graph.node:
        if node.op_type == "Squeeze" and len(node.input) == 1 and node.input[0] in shapes:
            axes = [axis for axis, size in enumerate(shapes[node.input[0]]) if size == 1]
            graph.initializer.append(numpy_helper.from_array(np.array(axes), f"{node.output[0]}.axes"))
            node.input.append(f"{node.output[0]}.axes")


def _give_biases(graph: onnx.GraphProto) -> None:
    """Give each LayerNormalization without a bias one of zeros.

    ONNX Runtime before 1.19 aborts when it optimises one without, and none fuses it with the sum before it.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 2 and node.input[1] in weights:
            scale = weights[node.input[1]]
            zeros = numpy_helper.from_array(np.zeros(tuple(scale.dims), np.float32), f"{scale.name}.zero_bias")
            if zeros.name not in weights:
                graph.initializer.append(zeros)
                weights[zeros.name] = zeros
            node.input.append(zeros.name)


def known_shapes(graph: onnx.GraphProto) -> dict[str, Shape]:
    """Return the shapes all of whose dimensions have a number or a name."""
    shapes = {}
    for value in [*graph.value_info, *graph.input, *graph.output]:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if dims and all(dims):
            shapes[value.name] = tuple(dims)
    return shapes


def drop_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes, weights, inputs and descriptions that no output depends on."""
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if any(output in needed for output in node.output):
            needed.update(_names_read(node))
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    for values in (graph.initializer, graph.input, graph.value_info):
        for index in reversed(range(len(values))):
            if values[index].name not in needed:
                del values[index]


def _names_read(node: onnx.NodeProto) -> set[str]:
    """Return the values a node reads, those its subgraphs capture included."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= _names_read(inner)
    return names

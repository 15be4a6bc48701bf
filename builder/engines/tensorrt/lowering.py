"""The graph for TensorRT's parser: constants computed, and GELU as the operators that TensorRT fuses into one.

Constants are folded by polygraphy over onnx-graphsurgeon. GELU: NVIDIA TensorRT, "Optimizing TensorRT performance",
supported fusions. Knows graphs; knows nothing about models.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from builder.common.errors import ExportError
from builder.graphs.onnx.graph import Graph, load_whole, save_graph
from builder.graphs.onnx.nodes import add_constant, replace_nodes
from builder.graphs.onnx.operators import STANDARD

TANH = 0.044715  # of GELU's approximation, Hendrycks and Gimpel 2016


def for_tensorrt(graph: Graph, folder: Path) -> Graph:
    """Write `graph`, of standard operators, into `folder`. Raises ExportError for an operator of another domain."""
    from polygraphy.backend.onnx import fold_constants  # here, so that builds for a CPU do not load it
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.ERROR):
        model = fold_constants(load_whole(graph.path), allow_onnxruntime_shape_inference=False)
    foreign = sorted({node.op_type for node in model.graph.node if node.domain not in STANDARD})
    if foreign:
        raise ExportError(f"TensorRT has no {', '.join(foreign)}; use --target cuda")
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.extend(_gelu(model.graph, node) if node.op_type == "Gelu" else [node])
    replace_nodes(model.graph, nodes)
    return save_graph(model, folder / "for-tensorrt" / graph.path.name)


def _gelu(graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for x / 2 * (1 + erf(x / sqrt 2)), or its approximation by tanh.

    The approximation: tanh(sqrt(2 / pi) * (x + 0.044715 x^3)).
    """
    (x,), (out,) = node.input, node.output
    approximate = any(attribute.s == b"tanh" for attribute in node.attribute)
    known = {tensor.name for tensor in graph.initializer}
    constants = {"half": 0.5, "one": 1.0, "root": math.sqrt(2 / math.pi) if approximate else math.sqrt(0.5)}
    if approximate:
        constants["cube"] = TANH
    names = {name: f"gelu.{name}.{value:.4f}" for name, value in constants.items()}
    for name, value in constants.items():
        if names[name] not in known:
            add_constant(graph, names[name], np.array(value, np.float32))
    nodes, inner = [], x
    if approximate:
        nodes = [
            helper.make_node("Mul", [x, x], [f"{out}.square"]),
            helper.make_node("Mul", [f"{out}.square", x], [f"{out}.cube"]),
            helper.make_node("Mul", [f"{out}.cube", names["cube"]], [f"{out}.term"]),
            helper.make_node("Add", [x, f"{out}.term"], [f"{out}.inner"]),
        ]
        inner = f"{out}.inner"
    return [
        *nodes,
        helper.make_node("Mul", [inner, names["root"]], [f"{out}.scaled"]),
        helper.make_node("Tanh" if approximate else "Erf", [f"{out}.scaled"], [f"{out}.bent"]),
        helper.make_node("Add", [f"{out}.bent", names["one"]], [f"{out}.shifted"]),
        helper.make_node("Mul", [x, f"{out}.shifted"], [f"{out}.doubled"]),
        helper.make_node("Mul", [f"{out}.doubled", names["half"]], [out]),
    ]

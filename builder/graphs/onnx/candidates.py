"""The most probable next tokens as outputs of a decoder's graph: they alone need to leave the device that it runs on.

Knows logits; knows nothing about sampling.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant
from builder.runtime.generation.executors.base import MAX_CANDIDATES, TOP_LOGITS, TOP_TOKENS


def with_candidates(graph: Graph, folder: Path) -> Graph:
    """Write `graph` with two more outputs into `folder`: the best logits of each position and their tokens.

    `top_logits`, (positions, count) float32, best first, and `top_tokens`, the same in int64. The executor binds
    `logits` or these: an output that is not bound is not copied.
    """
    model = load_graph(graph.path)
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    positions, vocabulary = logits.type.tensor_type.shape.dim
    count = min(MAX_CANDIDATES, vocabulary.dim_value)
    add_constant(model.graph, "top.count", np.array([count], np.int64))
    outputs = [TOP_LOGITS, TOP_TOKENS]
    model.graph.node.append(helper.make_node("TopK", ["logits", "top.count"], outputs, name="TopK.logits"))
    for name, kind in zip(outputs, (TensorProto.FLOAT, TensorProto.INT64), strict=True):
        model.graph.output.append(helper.make_tensor_value_info(name, kind, [positions.dim_param, count]))
    return save_graph(model, folder / "candidates" / graph.path.name)

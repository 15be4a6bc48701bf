"""The padding mask for CUDA's attention kernels: how many keys each row has, instead of a mask of every key.

Their fused kernels take a mask of lengths and no mask of keys (com.microsoft MultiHeadAttention, key_padding_mask of
shape (batch); ContribOperators.md). Both are the same for rows that are padded at their end, as the front model pads
them, and only for those. Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper

from builder.common.errors import ExportError
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, replace_nodes
from builder.graphs.onnx.operators import ATTENTION

KEY_PADDING_MASK = 4  # of the inputs of MultiHeadAttention


def count_keys(graph: Graph, folder: Path) -> Graph:
    """Write `graph` with lengths for masks into `folder`. Raises ExportError if attention has no mask."""
    model = load_graph(graph.path)
    masks = set()
    for node in model.graph.node:
        if node.op_type == ATTENTION and len(node.input) > KEY_PADDING_MASK and node.input[KEY_PADDING_MASK]:
            masks.add(node.input[KEY_PADDING_MASK])
            node.input[KEY_PADDING_MASK] += ".lengths"
    if graph.operators[ATTENTION] and not masks:
        raise ExportError("no fused attention of this graph has a padding mask; use --target tensorrt")
    if masks:
        add_constant(model.graph, "keys.axis", np.array([1], np.int64))
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        for mask in masks & set(node.output):
            inputs, name = [mask, "keys.axis"], f"{mask}.lengths"
            nodes.append(helper.make_node("ReduceSum", inputs, [name], keepdims=0))
    replace_nodes(model.graph, nodes)
    return save_graph(model, folder / "key-lengths" / graph.path.name)

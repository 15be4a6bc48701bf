"""Copying a slot of a cache that is not in this process's memory: ONNX Runtime does it, by a graph.

Knows shapes; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import helper

from builder.export.decoder import CacheShape
from builder.export.graph import Graph, save_graph

FILE = "copy_slot.onnx"
CACHE_ROWS = "cache_rows"


def slot_copier(caches: Sequence[CacheShape], element: int, like: Graph, folder: Path) -> Graph:
    """Write the graph: key_0 to key_0_copy and so on, each (1, heads, max_length, size) of `element`."""
    inputs, outputs, nodes = [], [], []
    for index, cache in enumerate(caches):
        for kind in ("key", "value"):
            name, shape = f"{kind}_{index}", (1, cache.heads, "max_length", cache.size)
            inputs.append(helper.make_tensor_value_info(name, element, shape))
            outputs.append(helper.make_tensor_value_info(f"{name}_copy", element, shape))
            nodes.append(helper.make_node("Identity", [name], [f"{name}_copy"], name=f"Identity.{name}"))
    model = helper.make_model(
        helper.make_graph(nodes, "copy_slot", inputs, outputs),
        opset_imports=[helper.make_opsetid("", like.opset)],
        ir_version=like.ir_version,
    )
    return save_graph(model, folder / "copier" / FILE)


def choose_rows(graph: Graph, folder: Path) -> Graph:
    """Write `graph` with an input `cache_rows`, (batch,) int64, into `folder`: the row of the past that each continues.

    Where the cache is nobody's memory but a tensor that each call takes and returns, this is how a slot is copied.
    """
    model = onnx.load(str(graph.path))
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    model.graph.input.append(helper.make_tensor_value_info(CACHE_ROWS, onnx.TensorProto.INT64, [batch]))
    past = [value.name for value in model.graph.input if value.name.startswith("past_")]
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in past:
                node.input[place] = f"{name}.chosen"
    chosen = [helper.make_node("Gather", [n, CACHE_ROWS], [f"{n}.chosen"], name=f"Gather.{n}", axis=0) for n in past]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*chosen, *kept])
    return save_graph(model, folder / "chosen-rows" / graph.path.name)

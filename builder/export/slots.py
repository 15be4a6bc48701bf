"""A graph that copies a slot of a cache: where the cache is not in this process's memory, ONNX Runtime copies it.

Knows shapes; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import helper

from builder.export.decoder import CacheShape
from builder.export.graph import Graph, save_graph

FILE = "copy_slot.onnx"


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

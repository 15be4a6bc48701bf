"""A graph by which ONNX Runtime creates a cache that is not in this process's memory, and copies parts of it.

Knows shapes; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, replace_nodes
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.cuda import length_name

FILE = "copy_slot.onnx"
CACHE_ROWS = "cache_rows"
CACHE_SLOTS = "cache_slots"
NEW_CACHE = "new_cache_length"


def slot_copier(caches: Sequence[LayerShape], element: int, like: Graph, folder: Path) -> Graph:
    """Write the graph: key_0 to key_0_copy and so on, vectors of `element`, each repeated to its length.

    Numbers of a tensor are copied as a vector of as many; a cache is created from one zero. The lengths are inputs of
    their own, one for all layers of a shape. bfloat16, for which engines have fewer kernels, is copied as float16.
    """
    element = onnx.TensorProto.FLOAT16 if element == onnx.TensorProto.BFLOAT16 else element
    sizes = dict.fromkeys(length_name(cache.heads, cache.size) for cache in caches)
    inputs = [helper.make_tensor_value_info(size, onnx.TensorProto.INT64, [1]) for size in sizes]
    outputs, nodes = [], []
    for index, cache in enumerate(caches):
        for kind in ("key", "value"):
            name, size = f"{kind}_{index}", length_name(cache.heads, cache.size)
            inputs.append(helper.make_tensor_value_info(name, element, [f"{name}.length"]))
            outputs.append(helper.make_tensor_value_info(f"{name}_copy", element, [f"{name}_copy.length"]))
            nodes.append(helper.make_node("Expand", [name, size], [f"{name}_copy"], name=f"Expand.{name}"))
    model = helper.make_model(
        helper.make_graph(nodes, "copy_slot", inputs, outputs),
        opset_imports=[helper.make_opsetid("", like.opset)],
        ir_version=like.ir_version,
    )
    return save_graph(model, folder / "copier" / FILE)


def choose_rows(graph: Graph, folder: Path) -> Graph:
    """Write `graph` with three more inputs into `folder`, for a cache that each call takes and returns as a tensor.

    `cache_rows`, (slots,) int64: the row of the past that each slot continues; this is how a slot is copied.
    `cache_slots`, (batch,) int64: the slots that the rows of this call are of; the others are returned as they were.
    `new_cache_length`, (1,) int64: 0, or the positions of a new cache of zeros, which is made where the graph runs; the
    past is not read then, and may be of one row and one position.
    """
    model = load_graph(graph.path)
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    past = [value for value in model.graph.input if value.name.startswith("past_")]
    for value in (*past, *(value for value in model.graph.output if value.name.startswith("present_"))):
        value.type.tensor_type.shape.dim[0].dim_param = "slots"
    renamed = {value.name: f"{value.name}.rows" for value in past}
    renamed |= {_present(value): f"{_present(value)}.rows" for value in past}
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for name, axes in ((CACHE_ROWS, ["slots"]), (CACHE_SLOTS, [batch]), (NEW_CACHE, [1])):
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, axes))
    add_constant(model.graph, "new_cache.none", np.zeros(1, np.int64))
    add_constant(model.graph, "cache.axis", np.array([1], np.int64))
    gathers = [helper.make_node("Gather", [v.name, CACHE_ROWS], [f"{v.name}.kept"], axis=0) for v in past]
    chosen_rows = helper.make_graph(gathers, "chosen_rows", [], _outputs(past, "kept"))
    branches = {"then_branch": _new_cache(past), "else_branch": chosen_rows}
    whole = [f"{value.name}.whole" for value in past]
    before = [
        helper.make_node("Greater", [NEW_CACHE, "new_cache.none"], ["new_cache"]),
        helper.make_node("If", ["new_cache"], whole, name="Cache", **branches),
        helper.make_node("Unsqueeze", [CACHE_SLOTS, "cache.axis"], ["cache.places"]),
        *(helper.make_node("Gather", [f"{v.name}.whole", CACHE_SLOTS], [renamed[v.name]], axis=0) for v in past),
    ]
    after = [
        helper.make_node("ScatterND", [f"{v.name}.whole", "cache.places", renamed[_present(v)]], [_present(v)])
        for v in past
    ]
    replace_nodes(model.graph, [*before, *model.graph.node, *after])
    return save_graph(model, folder / "chosen-rows" / graph.path.name)


def _present(past: onnx.ValueInfoProto) -> str:
    return past.name.replace("past_", "present_")


def _new_cache(past: Sequence[onnx.ValueInfoProto]) -> onnx.GraphProto:
    nodes, constants = [helper.make_node("Shape", [CACHE_ROWS], ["new.rows"])], []
    for value in past:
        tensor, name = value.type.tensor_type, value.name
        for axis, part in ((1, "heads"), (3, "size")):
            size = np.array([tensor.shape.dim[axis].dim_value], np.int64)
            constants.append(numpy_helper.from_array(size, f"{name}.{part}"))
        zero = helper.make_tensor("zero", tensor.elem_type, [1], [0])
        shape = ["new.rows", f"{name}.heads", NEW_CACHE, f"{name}.size"]
        nodes.append(helper.make_node("Concat", shape, [f"{name}.shape"], axis=0))
        nodes.append(helper.make_node("ConstantOfShape", [f"{name}.shape"], [f"{name}.new"], value=zero))
    return helper.make_graph(nodes, "new_cache", [], _outputs(past, "new"), constants)


def _outputs(past: Sequence[onnx.ValueInfoProto], suffix: str) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(f"{v.name}.{suffix}", v.type.tensor_type.elem_type, [None] * 4) for v in past]

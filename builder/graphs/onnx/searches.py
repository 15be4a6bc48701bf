"""Build a decoder step that runs cross-attention of all beams only if a text is searched.

`cross_attention` (builder/graphs/export/cached_attention.py) has the beams of a text as query heads of one row, always
as many as the maximum: rows that do not search would each attend that many times. In a step in which no text is
searched there is one query per text. Knows nodes; knows no architecture.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.likeliest import add_likeliest
from builder.graphs.onnx.nodes import attributes_of, constant, copy_of, replace_nodes
from builder.graphs.onnx.operators import CACHED_ATTENTION

SEARCHED = "cross.searched"  # True for a row other than the first beam of its text


def for_searches(graph: Graph, beams: int, folder: Path) -> Graph:
    """Write `graph`, the step of an encoder-decoder for up to `beams` rows per text, into `folder` as it is served."""
    model = load_graph(graph.path)
    add_likeliest(model)
    attend_alone(model, beams)
    return save_graph(model, folder / "searches" / graph.path.name)


def attend_alone(model: onnx.ModelProto, beams: int) -> None:
    """Build each cross-attention twice, in place: for all `beams` of a text and for the first.

    `cross_places`, each of which is place * beams + beam, tells which one runs.
    """
    sizes = {value.name: value.type.tensor_type.shape.dim[-1].dim_value for value in model.graph.input}
    nodes = [
        constant("cross.beams", beams),
        helper.make_node("Mod", ["cross_places", "cross.beams"], ["cross.beam_of"]),
        helper.make_node("ReduceMax", ["cross.beam_of"], ["cross.last_beam"], keepdims=0),
        helper.make_node("Cast", ["cross.last_beam"], [SEARCHED], to=TensorProto.BOOL),
    ]
    for node in model.graph.node:
        if node.op_type != CACHED_ATTENTION or not node.input[3].startswith("past_cross_"):
            nodes.append(node)
            continue
        branches = {"then_branch": _every_beam(node), "else_branch": _first_beam(node, beams, sizes[node.input[3]])}
        nodes.append(helper.make_node("If", [SEARCHED], list(node.output), node.name, **branches))
    replace_nodes(model.graph, nodes)


def _every_beam(node: onnx.NodeProto) -> onnx.GraphProto:
    inner = copy_of(node)
    inner.output[:] = [f"{name}.every" for name in node.output]
    return _branch("every", [inner], list(inner.output))


def _first_beam(node: onnx.NodeProto, beams: int, size: int) -> onnx.GraphProto:
    """Return the branch for the first beam of each text; queries are (places, 1, heads * beams * size).

    The answers of the other beams are not read.
    """
    name = node.output[0]
    heads = attributes_of(node)["kv_num_heads"]
    inner = copy_of(node)
    for attribute in inner.attribute:
        if attribute.name == "num_heads":
            attribute.i = heads
    inner.input[0] = f"{name}.query"
    inner.output[:] = [f"{name}.attended", *(f"{other}.first" for other in node.output[1:])]
    nodes = [
        constant(f"{name}.by_beam", [0, heads, beams, size]),
        constant(f"{name}.zero", 0),
        constant(f"{name}.flat", [0, 1, heads * size]),
        constant(f"{name}.by_head", [0, heads, 1, size]),
        constant(f"{name}.each_beam", [1, 1, beams, 1]),
        constant(f"{name}.whole", [0, 1, heads * beams * size]),
        helper.make_node("Reshape", [node.input[0], f"{name}.by_beam"], [f"{name}.queries"]),
        helper.make_node("Gather", [f"{name}.queries", f"{name}.zero"], [f"{name}.of_first"], axis=2),
        helper.make_node("Reshape", [f"{name}.of_first", f"{name}.flat"], [f"{name}.query"]),
        inner,
        helper.make_node("Reshape", [f"{name}.attended", f"{name}.by_head"], [f"{name}.one"]),
        helper.make_node("Expand", [f"{name}.one", f"{name}.each_beam"], [f"{name}.each"]),
        helper.make_node("Reshape", [f"{name}.each", f"{name}.whole"], [f"{name}.first"]),
    ]
    return _branch("first", nodes, [f"{name}.first", *inner.output[1:]])


def _branch(name: str, nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.GraphProto:
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, None) for value in outputs]
    return helper.make_graph(nodes, name, [], values)

"""The exported graph in standard operators alone, for engines that have their own fusions (OpenVINO, TensorRT).

com.microsoft MultiHeadAttention, and GroupQueryAttention without a cache, become two products and a softmax. One
export serves every engine, so that a rewrite of the graph applies to all of them. Knows graphs; knows nothing about
models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from builder.common.errors import ExportError
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant_once, attributes_of, copy_of
from builder.graphs.onnx.operators import ATTENTION, CACHED_ATTENTION, SPARSE_EXPERTS, STANDARD

MASKED = -10000.0  # mask_filter_value: MultiHeadAttention adds it to the scores of a masked key


def spell_out_attention(graph: Graph, folder: Path) -> Graph:
    """Write `graph` without operators of ONNX Runtime into `folder`, except for mixtures of experts.

    Raises ExportError for one it cannot replace.
    """
    model = load_graph(graph.path)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type in (ATTENTION, CACHED_ATTENTION):
            nodes.extend(_attention(model.graph, node, {output for other in nodes for output in other.output}))
        elif node.domain in STANDARD or node.op_type in SPARSE_EXPERTS:
            nodes.append(copy_of(node))
        else:
            raise ExportError(f"{node.domain} {node.op_type} has no standard form here; use --engine onnxruntime")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    domains = {*STANDARD, *(node.domain for node in nodes)}
    opsets = [entry for entry in model.opset_import if entry.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    return save_graph(model, folder / "plain" / graph.path.name)


def _attention(graph: onnx.GraphProto, node: onnx.NodeProto, produced: set[str]) -> list[onnx.NodeProto]:
    """Return nodes for softmax(query key^T * scale + mask + bias) value. `produced`: tensors of earlier nodes."""
    query, key, value = node.input[:3]
    grouped = node.op_type == CACHED_ATTENTION
    padding, bias = ("", "") if grouped else ([*node.input[4:6], "", ""])[:2]
    attributes = attributes_of(node)
    out = node.output[0]
    heads = f"heads.{attributes['num_heads']}"
    add_constant_once(graph, heads, np.array([0, 0, attributes["num_heads"], -1], np.int64))
    add_constant_once(graph, "heads.merged", np.array([0, 0, -1], np.int64))
    add_constant_once(graph, f"scale.{attributes['scale']}", np.array(attributes["scale"], np.float32))
    nodes = []
    if grouped and attributes["kv_num_heads"] != attributes["num_heads"]:
        nodes += [*_repeated(graph, node, key, f"{out}.k.all"), *_repeated(graph, node, value, f"{out}.v.all")]
        key, value = f"{out}.k.all", f"{out}.v.all"
    for name, source, order in (("q", query, (0, 2, 1, 3)), ("k", key, (0, 2, 3, 1)), ("v", value, (0, 2, 1, 3))):
        nodes.append(helper.make_node("Reshape", [source, heads], [f"{out}.{name}.heads"]))
        nodes.append(helper.make_node("Transpose", [f"{out}.{name}.heads"], [f"{out}.{name}"], perm=order))
    nodes.append(helper.make_node("MatMul", [f"{out}.q", f"{out}.k"], [f"{out}.products"]))
    nodes.append(helper.make_node("Mul", [f"{out}.products", f"scale.{attributes['scale']}"], [f"{out}.scores"]))
    scores = f"{out}.scores"
    if padding and f"{padding}.added" not in produced:
        add_constant_once(graph, "mask.axes", np.array([1, 2], np.int64))
        add_constant_once(graph, "mask.one", np.array(1, np.float32))
        add_constant_once(graph, "mask.value", np.array(MASKED, np.float32))
        nodes.append(helper.make_node("Cast", [padding], [f"{padding}.real"], to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node("Sub", ["mask.one", f"{padding}.real"], [f"{padding}.absent"]))
        nodes.append(helper.make_node("Mul", [f"{padding}.absent", "mask.value"], [f"{padding}.rows"]))
        nodes.append(helper.make_node("Unsqueeze", [f"{padding}.rows", "mask.axes"], [f"{padding}.added"]))
    for index, term in enumerate([f"{padding}.added"] * bool(padding) + [bias] * bool(bias)):
        nodes.append(helper.make_node("Add", [scores, term], [f"{out}.scores.{index}"]))
        scores = f"{out}.scores.{index}"
    if grouped or attributes.get("unidirectional"):
        nodes.extend(_causal(graph, scores, out))
        scores = f"{out}.scores.causal"
    nodes.append(helper.make_node("Softmax", [scores], [f"{out}.weights"], axis=-1))
    nodes.append(helper.make_node("MatMul", [f"{out}.weights", f"{out}.v"], [f"{out}.mixed"]))
    nodes.append(helper.make_node("Transpose", [f"{out}.mixed"], [f"{out}.rows"], perm=(0, 2, 1, 3)))
    nodes.append(helper.make_node("Reshape", [f"{out}.rows", "heads.merged"], [out]))
    for new_node in nodes:
        new_node.name = f"{new_node.op_type}.{new_node.output[0]}"
    return nodes


def _repeated(graph: onnx.GraphProto, node: onnx.NodeProto, source: str, repeated: str) -> list[onnx.NodeProto]:
    """Return nodes that repeat each head of keys or values (batch, sequence, key heads * size) for its queries."""
    attributes = attributes_of(node)
    heads, times = attributes["kv_num_heads"], attributes["num_heads"] // attributes["kv_num_heads"]
    add_constant_once(graph, f"heads.{heads}.apart", np.array([0, 0, heads, 1, -1], np.int64))
    add_constant_once(graph, f"heads.times.{times}", np.array([1, 1, 1, times, 1], np.int64))
    add_constant_once(graph, "heads.merged", np.array([0, 0, -1], np.int64))
    return [
        helper.make_node("Reshape", [source, f"heads.{heads}.apart"], [f"{repeated}.apart"]),
        helper.make_node("Tile", [f"{repeated}.apart", f"heads.times.{times}"], [f"{repeated}.tiled"]),
        helper.make_node("Reshape", [f"{repeated}.tiled", "heads.merged"], [repeated]),
    ]


def _causal(graph: onnx.GraphProto, scores: str, out: str) -> list[onnx.NodeProto]:
    """Return nodes that hide the keys after each query in `scores` (batch, heads, sequence, sequence)."""
    for name, number in (("zero", 0), ("one", 1)):
        add_constant_once(graph, f"causal.{name}", np.array(number, np.int64))
    for name, axis in (("first", 0), ("second", 1)):
        add_constant_once(graph, f"causal.{name}", np.array([axis], np.int64))
    add_constant_once(graph, "causal.last", np.array(-1, np.int64))
    add_constant_once(graph, "causal.hidden", np.array(np.float32(MASKED)))
    return [
        helper.make_node("Shape", [scores], [f"{out}.sizes"]),
        helper.make_node("Gather", [f"{out}.sizes", "causal.last"], [f"{out}.sequence"]),
        helper.make_node("Range", ["causal.zero", f"{out}.sequence", "causal.one"], [f"{out}.positions"]),
        helper.make_node("Unsqueeze", [f"{out}.positions", "causal.second"], [f"{out}.queries"]),
        helper.make_node("Unsqueeze", [f"{out}.positions", "causal.first"], [f"{out}.keys"]),
        helper.make_node("LessOrEqual", [f"{out}.keys", f"{out}.queries"], [f"{out}.seen"]),
        helper.make_node("Where", [f"{out}.seen", scores, "causal.hidden"], [f"{out}.scores.causal"]),
    ]

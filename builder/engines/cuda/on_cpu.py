"""Attention over blocks on a CPU, which has no kernel of it: PagedAttention in operators that a CPU has.

The new keys and values are put into their blocks; then each row, one after the other, is a GroupQueryAttention over the
blocks of its table. So this machine judges the graph, the tables and the loop that serve on a GPU, all except
CUDA's kernel itself. Meaning: ONNX Runtime, docs/contrib_ops/cuda/paged_attention.md, sections 1 and 5.1. Knows graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, attributes_of, replace_nodes
from builder.graphs.onnx.operators import CACHED_ATTENTION, DOMAIN
from builder.runtime.generation.executors.paged import OPERATOR

WHERE = "paged.where"  # (tokens, 2) int64: the block of each token, and its place in it


def on_cpu(graph: Graph, folder: Path) -> Graph:
    """Write `graph`, of blocks, for a CPU into `folder`."""
    model = load_graph(graph.path)
    sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    paged = [node for node in model.graph.node if node.op_type == OPERATOR]
    nodes = list(_places(model.graph, sizes[paged[0].input[3]][1]))
    for node in model.graph.node:
        if node.op_type == OPERATOR:
            nodes.extend(_attention(model.graph, node, sizes[node.input[3]]))
        else:
            nodes.append(node)
    replace_nodes(model.graph, nodes)
    return save_graph(model, folder / "blocks-on-cpu" / graph.path.name)


def _places(graph: onnx.GraphProto, block: int) -> Iterator[onnx.NodeProto]:
    """Yield nodes that find where the keys and values of each token go, the same in all layers."""
    for name, value in (("zero", 0), ("one", 1), ("block", block)):
        add_constant(graph, f"paged.{name}", np.array(value, np.int64))
    for name, values in (("last", [-1]), ("first", [0])):
        add_constant(graph, f"paged.{name}", np.array(values, np.int64))
    add_constant(graph, "paged.rest", np.array([np.iinfo(np.int64).max], np.int64))
    add_constant(graph, "paged.second", np.array([1], np.int64))
    make = helper.make_node
    long: dict[str, Any] = {"to": TensorProto.INT64}
    yield make("Cast", ["cumulative_sequence_length"], ["paged.begins"], **long)
    yield make("Cast", ["past_seqlens"], ["paged.past"], **long)
    yield make("Cast", ["block_table"], ["paged.table"], **long)
    yield make("Gather", ["paged.begins", "paged.last"], ["paged.count"])
    yield make("Squeeze", ["paged.count"], ["paged.tokens"])
    yield make("Range", ["paged.zero", "paged.tokens", "paged.one"], ["paged.token"])
    yield make("Slice", ["paged.begins", "paged.second", "paged.rest"], ["paged.ends"])
    yield make("Unsqueeze", ["paged.token", "paged.second"], ["paged.each"])
    yield make("GreaterOrEqual", ["paged.each", "paged.ends"], ["paged.after"])
    yield make("Cast", ["paged.after"], ["paged.afters"], **long)
    yield make("ReduceSum", ["paged.afters", "paged.second"], ["paged.row"], keepdims=0)
    yield make("Gather", ["paged.begins", "paged.row"], ["paged.begin"])
    yield make("Gather", ["paged.past", "paged.row"], ["paged.held"])
    yield make("Sub", ["paged.token", "paged.begin"], ["paged.new"])
    yield make("Add", ["paged.held", "paged.new"], ["paged.position"])
    yield make("Div", ["paged.position", "paged.block"], ["paged.number"])
    yield make("Mod", ["paged.position", "paged.block"], ["paged.offset"])
    yield make("Unsqueeze", ["paged.row", "paged.second"], ["paged.rows"])
    yield make("Unsqueeze", ["paged.number", "paged.second"], ["paged.numbers"])
    yield make("Concat", ["paged.rows", "paged.numbers"], ["paged.entry"], axis=1)
    yield make("GatherND", ["paged.table", "paged.entry"], ["paged.written"])
    yield make("Unsqueeze", ["paged.written", "paged.second"], ["paged.blocks"])
    yield make("Unsqueeze", ["paged.offset", "paged.second"], ["paged.offsets"])
    yield make("Concat", ["paged.blocks", "paged.offsets"], [WHERE], axis=1)
    yield make("Shape", ["past_seqlens"], ["paged.shape"])
    yield make("Squeeze", ["paged.shape"], ["paged.all"])


def _attention(graph: onnx.GraphProto, node: onnx.NodeProto, cache: Sequence[int]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes for `node`, whose cache is (blocks, tokens of a block, key heads, head size)."""
    _, _, key_heads, size = cache
    attributes = attributes_of(node)
    heads, of = attributes["num_heads"], f"{node.output[0]}."
    parts = list(node.input[:3])
    if not parts[1]:
        parts = [f"{of}{name}" for name in ("query", "key", "value")]
        add_constant(graph, f"{of}sizes", np.array([heads, key_heads, key_heads], np.int64) * size)
        yield helper.make_node("Split", [node.input[0], f"{of}sizes"], parts, axis=1)
    add_constant(graph, f"{of}shape", np.array([-1, key_heads, size], np.int64))
    for name, before, after in zip(parts[1:], node.input[3:5], node.output[1:3], strict=True):
        yield helper.make_node("Reshape", [name, f"{of}shape"], [f"{after}.new"])
        yield helper.make_node("ScatterND", [before, WHERE, f"{after}.new"], [after])
    kind = next(value.type.tensor_type.elem_type for value in graph.input if value.name == node.input[3])
    add_constant(graph, f"{of}nothing", np.zeros((0, heads * size), helper.tensor_dtype_to_np_dtype(kind)))
    add_constant(graph, f"{of}dense", np.array([1, -1, key_heads, size], np.int64))
    add_constant(graph, f"{of}wide", np.array([-1, heads * size], np.int64))
    body = _row(of, parts, list(node.output[1:3]), attributes, kind)
    yield helper.make_node("Loop", ["paged.all", "", f"{of}nothing"], [node.output[0]], name=node.name, body=body)


def _row(
    of: str, parts: Sequence[str], caches: Sequence[str], attributes: dict[str, Any], kind: int
) -> onnx.GraphProto:
    """Return the loop's body for one row: its part of the queries, attended, after those of the rows before it."""
    make = helper.make_node
    named = [f"{of}{name}" for name in ("row", "going", "before", "still", "after")]
    row, going, before, still, after = named
    nodes = [
        make("Add", [row, "paged.one"], [f"{of}next"]),
        make("Unsqueeze", [row, "paged.first"], [f"{of}here"]),
        make("Unsqueeze", [f"{of}next", "paged.first"], [f"{of}there"]),
        make("Gather", ["paged.begins", f"{of}here"], [f"{of}begin"]),
        make("Gather", ["paged.begins", f"{of}there"], [f"{of}end"]),
        make("Gather", ["paged.past", f"{of}here"], [f"{of}past"]),
        make("Gather", ["paged.table", row], [f"{of}table"]),
        make("Sub", [f"{of}end", f"{of}begin"], [f"{of}new"]),
        make("Add", [f"{of}past", f"{of}new"], [f"{of}total"]),
        make("Sub", [f"{of}total", "paged.one"], [f"{of}length"]),
        make("Cast", [f"{of}total"], [f"{of}total.32"], to=TensorProto.INT32),
        make("Cast", [f"{of}length"], [f"{of}length.32"], to=TensorProto.INT32),
        make("Identity", [going], [still]),
    ]
    for number, name in enumerate(parts):
        nodes.append(make("Slice", [name, f"{of}begin", f"{of}end", "paged.first"], [f"{of}part.{number}"]))
        nodes.append(make("Unsqueeze", [f"{of}part.{number}", "paged.first"], [f"{of}row.{number}"]))
    for number, cache in enumerate(caches):
        nodes.append(make("Gather", [cache, f"{of}table"], [f"{of}blocks.{number}"]))
        nodes.append(make("Reshape", [f"{of}blocks.{number}", f"{of}dense"], [f"{of}held.{number}"]))
        nodes.append(make("Transpose", [f"{of}held.{number}"], [f"{of}heads.{number}"], perm=[0, 2, 1, 3]))
    rows, held = [f"{of}row.{number}" for number in range(3)], [f"{of}heads.{number}" for number in range(2)]
    inputs = [*rows, *held, f"{of}length.32", f"{of}total.32"]
    outputs = [f"{of}attended", f"{of}present.0", f"{of}present.1"]
    nodes.append(make(CACHED_ATTENTION, inputs, outputs, domain=DOMAIN, **attributes))
    nodes.append(make("Reshape", [outputs[0], f"{of}wide"], [f"{of}answer"]))
    nodes.append(make("Concat", [before, f"{of}answer"], [after], axis=0))
    value = helper.make_tensor_value_info
    taken = [value(row, TensorProto.INT64, []), value(going, TensorProto.BOOL, []), value(before, kind, None)]
    given = [value(still, TensorProto.BOOL, []), value(after, kind, None)]
    return helper.make_graph(nodes, f"{of}rows", taken, given)

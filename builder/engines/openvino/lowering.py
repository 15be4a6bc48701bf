"""A decoder's graph over a paged cache, for OpenVINO: each GroupQueryAttention becomes PagedAttention.

PagedAttention is an operator of this project, by which an ONNX file names OpenVINO's PagedAttentionExtension: OpenVINO
2026.4 has that operator in memory, but does not read it from a file of its own. The emitted executor translates it
while it reads the graph (builder/runtime/generation/executors/openvino.py).

Inputs, for the tokens of all rows of a call one after the other:
  input_ids, position_ids      (1, tokens) int64
  logits_positions             (positions,) int64, the tokens whose logits are computed
  key_cache.i, value_cache.i   blocks of each layer, in the layout and type of OpenVINO's CPU plugin
  past_lens                    (rows,) int32, tokens in the cache before this call
  subsequence_begins           (rows + 1,) int32, where each row's tokens begin
  block_indices                the blocks of each row, one row after the other, int32
  block_indices_begins         (rows + 1,) int32, where each row's blocks begin
  max_context_len              () int32, the most tokens of any row after this call
Of a draft also hidden_states (1, tokens, size), which it reads. Where layers keep states, also the inputs that
builder/engines/openvino/states.py names.
Outputs: logits (positions, vocabulary), and those of the exported graph beside its present.

Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from builder.common.errors import ExportError
from builder.engines.openvino.factors import scale_inputs
from builder.engines.openvino.states import page_state, table_name
from builder.graphs.onnx.cleanup import drop_unused, known_shapes
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, attributes_of, replace_nodes
from builder.graphs.onnx.operators import CACHED_ATTENTION, CACHED_BIAS, CACHED_SINKS, STATEFUL
from builder.graphs.onnx.paging import count_one_row, refuse_leftovers
from builder.runtime.generation.executors.base import HIDDEN_STATES
from builder.runtime.generation.executors.openvino_graph import DOMAIN, STATE_TABLES, TABLES
from builder.runtime.generation.executors.paged import OPERATOR
from builder.runtime.generation.executors.states import APPENDED_ROWS

ENGINE = "openvino"
ADVICE = "use --engine onnxruntime"
ROTATED = "rotary_embedding_dim"
BIAS_KEYS = 64  # keys over which a bias is looked at


def page_attention(graph: Graph, folder: Path) -> Graph:
    """Write `graph` with its attention over a paged cache into `folder`. Raises ExportError for others."""
    model = load_graph(graph.path)
    scale_inputs(model.graph)
    slopes = _slopes(model)
    past = {value.name: value for value in model.graph.input if value.name.startswith("past_")}
    shapes, renamed = known_shapes(model.graph), {}
    tables: dict[str, Sequence[int]] = {}  # of states: the shapes of rows, by name
    for name in past:
        _, kind, layer, *_ = name.split("_")
        renamed[name] = table_name(name) if kind == "state" else f"{kind}_cache.{layer}"
    nodes: list[onnx.NodeProto] = []
    written: dict[str, list[str]] = {}  # by present keys: keys, values and cache of the layer
    appended = {APPENDED_ROWS}  # names of "the call appends to this row", which it does
    for node in model.graph.node:
        if node.op_type == CACHED_ATTENTION:
            if node.input[3] in written:  # the operator cannot read without writing: it writes the same once more
                node.input[1:5] = written[node.input[3]]
            size = past[node.input[3]].type.tensor_type.shape.dim[3].dim_value
            nodes.extend(_unpacked(model.graph, node, size))
            if len(node.output) > 1:
                written[node.output[1]] = node.input[1:5]
            _make_paged(node, renamed, slopes, size)
        elif node.op_type in STATEFUL:
            tables.update(page_state(node, shapes, ADVICE))
        elif node.op_type == "Reshape" and node.input[0] in appended:
            appended.add(node.output[0])
        elif node.op_type == "Where" and node.input[0] in appended:
            node = helper.make_node("Identity", [node.input[1]], list(node.output))
        elif node.op_type == "BitwiseXor":
            raise ExportError(f"it computes hashes of tokens in 64 bits, of which OpenVINO keeps 32; {ADVICE}")
        elif node.op_type == "Shape" and node.input[0] in renamed:
            count_one_row(node, ADVICE)
        elif node.op_type == "RotaryEmbedding" and any(a.name == ROTATED for a in node.attribute):
            nodes.extend(_rotation_of_a_part(model.graph, node))
            continue
        nodes.append(node)
    replace_nodes(model.graph, nodes)
    add_constant(model.graph, APPENDED_ROWS, np.ones(1, np.bool_))  # all tokens are one row
    _declare(model.graph, renamed, tables)
    drop_unused(model.graph)
    refuse_leftovers(model.graph, ADVICE)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return replace(save_graph(model, folder / "paged" / graph.path.name), engine=ENGINE)


def _make_paged(node: onnx.NodeProto, renamed: dict[str, str], slopes: dict[str, str], size: int) -> None:
    attributes = attributes_of(node)
    if attributes.get("softcap"):
        raise ExportError(
            "its attention caps scores (softcap), which OpenVINO's attention does not do; use --engine onnxruntime"
        )
    bias, sinks = ([*node.input[CACHED_BIAS:], "", ""])[: CACHED_SINKS - CACHED_BIAS + 1]
    caches = [renamed[name] for name in node.input[3:5]]
    del node.input[3:]
    node.input.extend([*caches, *TABLES, *([slopes[bias]] if bias else []), *([sinks] if sinks else [])])
    del node.output[1:]
    node.op_type, node.domain = OPERATOR, DOMAIN
    node.attribute.append(helper.make_attribute("head_size", size))
    if sinks:
        node.attribute.append(helper.make_attribute("has_sinks", 1))


def _unpacked(graph: onnx.GraphProto, node: onnx.NodeProto, size: int) -> Iterator[onnx.NodeProto]:
    """Yield a Split for queries, keys and values in one tensor, which GroupQueryAttention takes apart by itself."""
    if node.input[1]:
        return
    heads = {a.name: a.i for a in node.attribute}
    sizes, parts = f"{node.name}.sizes", [f"{node.name}.{part}" for part in ("query", "key", "value")]
    counts = [heads["num_heads"], heads["kv_num_heads"], heads["kv_num_heads"]]
    add_constant(graph, sizes, np.array(counts, np.int64) * size)
    yield helper.make_node("Split", [node.input[0], sizes], parts, axis=-1)
    node.input[0], node.input[1], node.input[2] = parts


def _rotation_of_a_part(graph: onnx.GraphProto, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield nodes that rotate the first numbers of each head apart from the rest.

    OpenVINO 2026.4 computes a RotaryEmbedding of a part wrongly.
    """
    attributes = {a.name: a.i for a in node.attribute}
    heads, rotated = attributes["num_heads"], attributes.pop(ROTATED)
    (source, *tables), (output,) = node.input, node.output
    for name, value in (("by.heads", [0, 0, heads, -1]), ("in.rows", [0, 0, -1]), ("rotated", [rotated])):
        add_constant(graph, f"{output}.{name}", np.array(value, np.int64))
    for name, number in (("zero", 0), ("last", np.iinfo(np.int64).max), ("axis", -1)):
        add_constant(graph, f"{output}.{name}", np.array([number], np.int64))
    make, of = helper.make_node, f"{output}."
    yield make("Reshape", [source, f"{of}by.heads"], [f"{of}heads"])
    yield make("Slice", [f"{of}heads", f"{of}zero", f"{of}rotated", f"{of}axis"], [f"{of}part"])
    yield make("Slice", [f"{of}heads", f"{of}rotated", f"{of}last", f"{of}axis"], [f"{of}rest"])
    yield make("Reshape", [f"{of}part", f"{of}in.rows"], [f"{of}flat"])
    yield make(node.op_type, [f"{of}flat", *tables], [f"{of}turned"], domain=node.domain, **attributes)
    yield make("Reshape", [f"{of}turned", f"{of}by.heads"], [f"{of}turned.heads"])
    yield make("Concat", [f"{of}turned.heads", f"{of}rest"], [f"{of}whole"], axis=-1)
    yield make("Reshape", [f"{of}whole", f"{of}in.rows"], [output])


def _slopes(model: onnx.ModelProto) -> dict[str, str]:
    """Return, by the name of each bias on scores, a new constant: how much it grows from key to key (ALiBi).

    The constant is (heads,). Raises ExportError for a bias that is another function of positions.
    """
    slopes = {}
    for node in model.graph.node:
        biased = node.op_type == CACHED_ATTENTION and len(node.input) > CACHED_BIAS
        bias = node.input[CACHED_BIAS] if biased else ""
        if bias and bias not in slopes:
            slopes[bias] = f"{bias}.slopes"
            add_constant(model.graph, slopes[bias], _slopes_of(model, bias))
    return slopes


def _slopes_of(model: onnx.ModelProto, bias: str) -> np.ndarray:
    names = {value.name for value in model.graph.input}
    extracted = onnx.utils.Extractor(model).extract_model([n for n in _inputs_of(model, bias) if n in names], [bias])
    feeds = {
        "input_ids": np.zeros((1, 1), np.int64),
        "total_sequence_length": np.array([BIAS_KEYS], np.int32),
    }
    needed = {value.name for value in extracted.graph.input}
    if needed & {"position_ids", "seqlens_k"}:
        raise ExportError(
            "its attention hides keys by the place of their query, as attention in chunks does, which OpenVINO's does "
            "not: use --engine onnxruntime, or a --max-length of one chunk at most"
        )
    if not needed <= set(feeds):
        raise ExportError(
            f"its attention has a bias that depends on {min(needed - set(feeds))}, not on positions alone, as "
            "OpenVINO's has to; use --engine onnxruntime"
        )
    values = ReferenceEvaluator(extracted).run(None, {n: feeds[n] for n in needed})[0].astype(np.float64)[0, :, 0]
    slopes = values[:, 1] - values[:, 0]
    if not np.allclose(values - values[:, :1], slopes[:, None] * np.arange(BIAS_KEYS), atol=1e-4):
        raise ExportError(
            "its attention has a bias that is not ALiBi, the only one that OpenVINO's takes; use --engine onnxruntime"
        )
    return slopes.astype(np.float32)


def _inputs_of(model: onnx.ModelProto, name: str) -> set[str]:
    """Return all names that `name` is computed from."""
    makers = {output: node for node in model.graph.node for output in node.output}
    seen, pending = set(), [name]
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            pending.extend(makers[one].input if one in makers else ())
    return seen


def _declare(graph: onnx.GraphProto, renamed: dict[str, str], tables: dict[str, Sequence[int]]) -> None:
    """Declare the graph's inputs and outputs, as the module says above. `tables`: the shapes of states, by name."""
    declared = {value.name: value for value in graph.input}
    outputs = [value for value in graph.output if not value.name.startswith("present_")]
    del graph.output[:]
    graph.output.extend(outputs)
    del graph.input[:]
    for name in ("input_ids", "position_ids"):
        if name in declared:
            graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1, "tokens"]))
    graph.input.extend(declared[name] for name in ("logits_positions", HIDDEN_STATES) if name in declared)
    for name in renamed.values():
        shape = (None, *tables[name]) if name in tables else [None] * 4
        graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    for name, rank in (TABLES | STATE_TABLES).items():
        graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [None] * rank))
    del graph.value_info[:]  # of (batch, sequence)

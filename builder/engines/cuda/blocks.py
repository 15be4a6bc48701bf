"""A decoder's graph over a cache in blocks, for ONNX Runtime on a GPU: GroupQueryAttention becomes its PagedAttention.

Inputs, for the tokens of all rows of a call one after the other:
  input_ids, position_ids        (1, tokens) int64
  logits_positions               (positions,) int64, the tokens whose logits are computed
  key_cache.i, value_cache.i     (blocks, tokens of a block, key heads, head size) of each layer
  cumulative_sequence_length     (rows + 1,) int32, where each row's tokens begin
  past_seqlens                   (rows,) int32, tokens in the cache before this call
  block_table                    (rows, most blocks) int32, the blocks of each row
  attention_metadata             (3,) int32 on the host: the most new tokens of a row, and the most tokens, twice
Outputs: logits (positions, vocabulary) and key_cache_out.i, value_cache_out.i, to be bound to the buffers that go in.

Facts about the operator and their sources in ONNX Runtime (under onnxruntime/contrib_ops/ unless a path is whole):

    since 1.23, on CUDA alone, a cache of fp16 and bf16        docs/OperatorKernels.md of the releases
    `attention_metadata`, a table that is checked              1.31.1's own schema; cuda/bert/paged_attention.cc
    FlashAttention, from compute capability 8.0 on             cuda/bert/flash_attention/flash_api.h, is_supported
    cuDNN for a token a row, from 9.0 on                       pull request 32493; the wheel names CudnnPagedAttention
    older cards: a scalar kernel for a token a row, else all   cuda/bert/paged_attention.cc, decode_eligible,
    keys are gathered, with bounds rows x the longest of them  needs_dense_kv, needs_readback
    head sizes: multiples of 8 up to 256                       cpu/bert/paged_attention_helper.h; flash_api.h
    blocks: powers of two from 16 on, and multiples of 256     cpu/bert/paged_attention_helper.h, CheckKVCache;
    tokens for heads up to 64, 128 up to 128, 64 up to 256     cuda/bert/paged_attention.cc, flash_min_block_size
    keys and values of one size                                cpu/bert/paged_attention_helper.h, Check_Q_K_V
    a window of W keys, the query's own included               cuda/bert/paged_attention_impl.cu, local_window_size - 1
    rows may bring one token or many, in one call              docs/contrib_ops/cuda/paged_attention.md
    the cache is written in place: outputs are the inputs      cuda/bert/paged_attention.cc, "must be the same buffer"
    no bias on scores                                          docs/contrib_ops/cuda/paged_attention.md, section 10

Before 1.31 more than 256 rows of a call gave wrong offsets, then an error (the document's section 18), blocks had to be
of 256 tokens, and the kernel waited for the lengths in each layer. Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.common.errors import ExportError, SpecError
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant_once, attributes_of, replace_nodes
from builder.graphs.onnx.operators import CACHED_ATTENTION, DOMAIN
from builder.graphs.onnx.paging import count_one_row, refuse_leftovers
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import TABLES, block_tokens, cache_name
from builder.runtime.generation.executors.paged import OPERATOR

ADVICE = "give --slots and no --cache-gb"
SHARED = frozenset(
    {"num_heads", "kv_num_heads", "scale", "local_window_size", "softcap"}
)  # attributes of both operators
BOUNDS, METADATA = "attention_metadata", 16  # the input with bounds on lengths, and its place among the operator's


def page_attention(graph: Graph, folder: Path, bounded: bool = True) -> Graph:
    """Write `graph` with its attention over blocks into `folder`. Raises SpecError and ExportError for others.

    `bounded`: it takes `attention_metadata`.
    """
    return save_graph(_over_blocks(graph, bounded), folder / "blocks" / graph.path.name)


def why_not_paged(graph: Graph) -> str | None:
    """Return why the attention of `graph` cannot be over blocks; None if it can be."""
    try:
        _over_blocks(graph, bounded=True)
    except (SpecError, ExportError) as error:
        return str(error).removesuffix(f"; {ADVICE}")
    return None


def _over_blocks(graph: Graph, bounded: bool) -> onnx.ModelProto:
    """Return `graph` over blocks, without the weights that lie beside it. See `page_attention`."""
    tables = {name: axes for name, axes in TABLES.items() if bounded or name != BOUNDS}
    model = load_graph(graph.path)
    past = {}
    for value in model.graph.input:
        if value.name.startswith("past_"):
            dims = value.type.tensor_type.shape.dim
            past[value.name] = LayerShape(dims[1].dim_value, dims[3].dim_value)
    block = block_tokens(Geometry.pairs([*past.values()]))
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == CACHED_ATTENTION:
            nodes.extend(_paged(model.graph, node, past[node.input[3]].size, tables))
            continue
        if node.op_type == "Shape" and node.input[0] in past:
            count_one_row(node, ADVICE)
        nodes.append(node)
    replace_nodes(model.graph, nodes)
    _declare(model.graph, past, block, tables)
    drop_unused(model.graph)
    refuse_leftovers(model.graph, ADVICE)
    return model


def _cache(name: str, after: str = "") -> str:
    """Return the name that replaces past_key_0, or present_key_0 with `after`."""
    _, kind, layer = name.split("_")
    return cache_name(kind, int(layer), after)


def _paged(
    graph: onnx.GraphProto, node: onnx.NodeProto, size: int, tables: Collection[str]
) -> Iterator[onnx.NodeProto]:
    """Yield PagedAttention in place of `node`, between reshapes: it takes (tokens, hidden), without an axis of rows."""
    attributes = attributes_of(node)
    unknown = sorted({name for name, value in attributes.items() if value} - SHARED)
    if unknown or any(node.input[7:]):
        raise SpecError(
            f"its attention has {unknown[0] if unknown else 'an input'} that ONNX Runtime's PagedAttention does not "
            f"take as GroupQueryAttention does; {ADVICE}"
        )
    heads, key_heads, output = attributes["num_heads"], attributes["kv_num_heads"], node.output[0]
    whole = heads + 2 * key_heads if not node.input[1] else heads
    flat: list[str] = []
    for name, count in zip(node.input[:3], (whole, key_heads, key_heads), strict=True):
        flat.append(f"{output}.{len(flat)}" if name else "")
        if name:
            shape = f"paged.{count * size}"
            add_constant_once(graph, shape, np.array([-1, count * size], np.int64))
            yield helper.make_node("Reshape", [name, shape], [flat[-1]])
    inputs = [*flat, *(_cache(name) for name in node.input[3:5]), *(name for name in tables if name != BOUNDS)]
    if BOUNDS in tables:
        inputs += [*[""] * (METADATA - len(inputs)), BOUNDS]
    outputs = [f"{output}.flat", *(_cache(name, "_out") for name in node.input[3:5])]
    shared = {name: value for name, value in attributes.items() if name in SHARED}
    yield helper.make_node(OPERATOR, inputs, outputs, name=node.name, domain=DOMAIN, **shared)
    add_constant_once(graph, f"paged.rows.{heads * size}", np.array([1, -1, heads * size], np.int64))
    yield helper.make_node("Reshape", [outputs[0], f"paged.rows.{heads * size}"], [output])


def _declare(
    graph: onnx.GraphProto, past: dict[str, LayerShape], block: int, tables: Mapping[str, Sequence[int | str]]
) -> None:
    """Declare the graph's inputs and outputs, as the module says above."""
    declared = {value.name: value for value in (*graph.input, *graph.output)}
    element = next(declared[name] for name in past).type.tensor_type.elem_type
    answered = [value for value in graph.output if not value.name.startswith("present_")]
    caches = [(name, ["blocks", block, shape.heads, shape.size]) for name, shape in past.items()]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1, "tokens"])
        for name in ("input_ids", "position_ids")
        if name in declared
    ]
    inputs += [declared["logits_positions"]]
    inputs += [helper.make_tensor_value_info(_cache(name), element, shape) for name, shape in caches]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, axes) for name, axes in tables.items()]
    outputs = [helper.make_tensor_value_info(_cache(name, "_out"), element, shape) for name, shape in caches]
    _replace(graph.input, inputs)
    _replace(graph.output, [*answered, *outputs])
    del graph.value_info[:]  # of (batch, sequence)


def _replace(values: Any, new: Sequence[onnx.ValueInfoProto]) -> None:
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in new]
    del values[:]
    values.extend(copies)

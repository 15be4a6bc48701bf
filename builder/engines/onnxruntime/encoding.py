"""ONNX Runtime for encoders: on the CPU, on a GPU by CUDA, and on a GPU by its own TensorRT."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import numpy as np
from onnx import helper

from builder.common.errors import ExportError
from builder.common.machine import VNNI
from builder.engines.cuda import without_kernel
from builder.engines.encoding import EncodingEngine, Variant
from builder.engines.onnxruntime import BACKEND
from builder.engines.tensorrt import refuse_release
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, replace_nodes
from builder.graphs.onnx.operators import ATTENTION, ATTENTION_BIAS, CACHED_ATTENTION

KEY_PADDING_MASK = 4  # of the inputs of MultiHeadAttention


class OnnxRuntimeEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"cpu": "", "cuda": "CUDA", "tensorrt": "TensorRT by ONNX Runtime"}
    variants = (
        Variant("fp32", BACKEND),
        Variant("fp16", BACKEND),
        Variant("int8", BACKEND, VNNI),
        Variant("int8-static", BACKEND, VNNI),
        Variant("int8-weights", BACKEND, VNNI),
        Variant("int4-weights", BACKEND, VNNI),
        *(Variant(precision, BACKEND, target="cuda") for precision in ("fp32", "fp16", "bf16")),
        *(Variant(precision, BACKEND, target="tensorrt") for precision in ("fp32", "fp16", "int8-static")),
    )

    def reads_fused(self, target: str) -> bool:
        return target != "tensorrt"

    def source(self, graph: Graph, target: str, folder: Path) -> Graph:
        if target == "tensorrt":
            return for_tensorrt(graph, folder)
        return _count_keys(graph, folder) if target == "cuda" else graph

    def refuse_release(self, target: str, triton: str) -> None:
        if target == "tensorrt":
            refuse_release(triton)

    def without_half(self, operators: Collection[str], precision: str, target: str, triton: str) -> Collection[str]:
        return without_kernel(operators, precision, triton, in_process=False) if target == "cuda" else ()


def _count_keys(graph: Graph, folder: Path) -> Graph:
    """Write `graph` into `folder` with the lengths of rows in place of masks of keys.

    CUDA's fused attention kernels take how many keys each row has, and no mask of every key (com.microsoft
    MultiHeadAttention, key_padding_mask of shape (batch); ContribOperators.md). Both mean the same for rows that are
    padded at their end, as the front model pads them, and only for those. Raises ExportError if attention has no mask,
    nor scores in its place.
    """
    model = load_graph(graph.path)
    masks, biased = set(), 0
    for node in model.graph.node:
        biased += node.op_type == ATTENTION and len(node.input) > ATTENTION_BIAS
        if node.op_type == ATTENTION and len(node.input) > KEY_PADDING_MASK and node.input[KEY_PADDING_MASK]:
            masks.add(node.input[KEY_PADDING_MASK])
            node.input[KEY_PADDING_MASK] += ".lengths"
    if graph.operators[ATTENTION] + graph.operators[CACHED_ATTENTION] > biased and not masks:
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


ENCODING = OnnxRuntimeEncoding()

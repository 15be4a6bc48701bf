"""ONNX Runtime for encoders: on the CPU, on a GPU by CUDA, and on a GPU by its own TensorRT."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import numpy as np
from onnx import helper

from builder.common.cards import CARDS
from builder.common.errors import ExportError, SpecError
from builder.common.machine import VNNI
from builder.common.releases import version_tuple
from builder.engines.cuda import without_kernel
from builder.engines.encoding import EncodingEngine, Variant
from builder.engines.onnxruntime import BACKEND
from builder.engines.tensorrt import refuse_release
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, replace_nodes
from builder.graphs.onnx.operators import ATTENTION, ATTENTION_BIAS, CACHED_ATTENTION
from builder.options import BuildSpec

TF32_SINCE = (8, 0)  # compute capability
KEY_PADDING_MASK = 4  # of the inputs of MultiHeadAttention


class OnnxRuntimeEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"cpu": "", "cuda": "CUDA", "tensorrt": "TensorRT by ONNX Runtime"}
    takes_adapters: ClassVar = True
    auto = ("fp32", "int8", "int8-static")  # the others were slower on every CPU that ran them
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

    def refuse_on_gpu(self, spec: BuildSpec, precision: str) -> None:
        if spec.target == "tensorrt":
            refuse_release(spec.triton)
            _refuse_tf32(spec.gpu.card, precision)

    def without_half(self, operators: Collection[str], precision: str, target: str, triton: str) -> Collection[str]:
        return without_kernel(operators, precision, triton, in_process=False) if target == "cuda" else ()


def _refuse_tf32(card: str | None, precision: str) -> None:
    """Raise SpecError if ONNX Runtime's TensorRT would multiply fp32 as TF32.

    It leaves TensorRT's flag TF32 on, and has no option for it (microsoft/onnxruntime, issue 26029); cards before 8.0
    have no TF32.
    """
    if precision != "fp32" or (card is not None and version_tuple(CARDS[card].compute_capability) < TF32_SINCE):
        return
    older = ", ".join(name for name, one in CARDS.items() if version_tuple(one.compute_capability) < TF32_SINCE)
    raise SpecError(
        "ONNX Runtime's TensorRT multiplies fp32 as TF32 on cards of compute capability 8.0 and later, and has no "
        f"option against it: leave --engine out for a plan, which keeps fp32, use --precision fp16, or --gpu {older}"
    )


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

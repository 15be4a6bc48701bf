"""Store keys and values as 8-bit integers: a quarter of the cache's memory, and of the bytes that each token reads.

GroupQueryAttention rounds what it writes and scales what it reads, with one constant step a channel, taken from the
largest value that the samples put there. Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from builder.common.errors import SpecError, VerificationError
from builder.engines.optimise.prompt_attention import attend_prompts_in_fp32
from builder.graphs.onnx.graph import MODEL_FILE, Graph, load_graph, operator_needs, save_graph
from builder.graphs.onnx.nodes import add_constant
from builder.graphs.onnx.operators import CACHED_ATTENTION, SHARED_CACHE_NEED

MARGIN = 1.25  # over the largest value seen: larger values are clipped
SCALE_INPUTS = 12  # k_scale is the operator's thirteenth input, v_scale the one after it


def quantise_cache(graph: Graph, largest: Mapping[str, np.ndarray], folder: Path) -> Graph:
    """Write `graph` with an int8 cache. `largest`: the largest of each cache tensor (key_0, ...), (heads, size).

    Raises SpecError for layers that share a cache: a quantised one is read only where it is written
    (onnxruntime/contrib_ops/cpu/bert/gqa_attention_base.h, ApplyAttentionQuantized).
    """
    if SHARED_CACHE_NEED in operator_needs(graph):
        raise SpecError(
            "its layers share keys and values, which ONNX Runtime does not do in an int8 cache: leave --cache out, or "
            "use --engine openvino"
        )
    model = load_graph(graph.path)
    changed = 0
    for node in model.graph.node:
        if node.op_type != CACHED_ATTENTION:
            continue
        layer = node.input[3].removeprefix("past_key_")
        node.input.extend([""] * (SCALE_INPUTS - len(node.input)))
        for kind in ("key", "value"):
            scale = np.maximum(largest[f"{kind}_{layer}"] * MARGIN / 127, 1e-8).astype(np.float32).ravel()
            add_constant(model.graph, f"{kind}_{layer}.cache_scale", scale)
            node.input.append(f"{kind}_{layer}.cache_scale")
            node.attribute.append(helper.make_attribute(f"{kind[0]}_quant_type", "PER_CHANNEL"))
        node.attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
        changed += 1
    if not changed:
        raise VerificationError("the graph has no cache to quantise; use --cache fp32")
    attend_prompts_in_fp32(model)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.name.startswith(("past_key_", "past_value_", "present_key_", "present_value_")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    return save_graph(model, folder / f"{graph.path.parent.name}-int8-cache" / MODEL_FILE)

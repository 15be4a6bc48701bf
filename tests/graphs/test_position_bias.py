"""Biases on positions: their memory in a graph is the memory that builds and plans count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnxruntime import InferenceSession, OrtValue

from builder.building.pipeline import build
from builder.common.errors import SpecError
from builder.common.memory import bias_bytes
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.architectures import bias_heads
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import CACHED_ATTENTION, CACHED_BIAS
from builder.options import make_spec
from builder.serving.plan.needs import published
from builder.serving.plan.unbuilt import needs_of_checkpoint
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.tiny_encoders import VOCABULARY

TOKENS, LENGTH = 64, 128


@pytest.mark.parametrize(
    ("model_type", "options", "heads"),
    [
        ("bloom", {}, 4),
        ("falcon", {"alibi": True}, 4),
        ("inkling_text", {}, 4),
        ("inkling2_text", {}, 4),
        ("llama4_text", {}, 1),
        ("mpt", {}, 4),
    ],
)
def test_counted_bytes_are_those_of_a_call(
    model_type: str, options: dict[str, Any], heads: int, tmp_path: Path
) -> None:
    """A call reads and writes no tensors together that take more than the counted bytes, constants aside."""
    model = make_decoder(model_type, **options)
    assert bias_heads(model) == heads
    graph = fuse(export_decoder(model, tmp_path, LENGTH).graph, tmp_path)
    sizes, biases, nodes = computed(graph)
    assert {sizes[name] for name in biases} == {heads * TOKENS * LENGTH * 4}
    largest = max(sum(sizes.get(name, 0) for name in {*node.input, *node.output}) for node in nodes)
    assert largest <= 1.05 * bias_bytes(heads, TOKENS, LENGTH)


def computed(graph: Graph) -> tuple[dict[str, int], set[str], list[onnx.NodeProto]]:
    """Run the last `TOKENS` of `LENGTH`: the bytes of what nodes outside of attention compute, biases, those nodes."""
    model = onnx.load(str(graph.path))
    nodes = [node for node in model.graph.node if node.op_type != CACHED_ATTENTION]
    attentions = [node for node in model.graph.node if node.op_type == CACHED_ATTENTION]
    biases = {node.input[CACHED_BIAS] for node in attentions if len(node.input) > CACHED_BIAS} - {""}
    names = {name for node in nodes for name in node.output if name} - set(graph.outputs)
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in sorted(names))
    path = graph.path.with_name("every-output.onnx")
    onnx.save(model, str(path))
    sizes = {"batch": 1, "sequence": TOKENS, "max_length": LENGTH, "positions": 1}
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in tensor.shape.dim]
        feeds[value.name] = np.zeros(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    feeds["input_ids"][:] = np.random.default_rng(0).integers(5, VOCABULARY, TOKENS)
    if "position_ids" in feeds:
        feeds["position_ids"][:] = np.arange(LENGTH - TOKENS, LENGTH)
    feeds["seqlens_k"][:], feeds["total_sequence_length"][:] = LENGTH - 1, LENGTH
    values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    session = InferenceSession(str(path))  # whose values may be bf16, which numpy does not have
    answers = session.run_with_ort_values(sorted(names), values)
    return {n: a.tensor_size_in_bytes() for n, a in zip(sorted(names), answers, strict=True)}, biases, nodes


def test_build_and_plan_count_the_bias_of_a_call(tmp_path: Path) -> None:
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", "bloom")
    options = {"model": str(checkpoint), "name": "m", "output": tmp_path / "out", "max_length": 64, "slots": 2}
    with pytest.raises(SpecError, match=r"the bias on positions need .* GB .*; lower serving.prefill_tokens"):
        build(make_spec(**options, machine={"memory_gb": 0.0005}))
    spec = make_spec(**options, precision="fp32")
    report = build(spec)
    assert report.memory is not None
    assert report.memory["bias"] == bias_bytes(4, spec.prefill_tokens, 64)
    assert published(tmp_path / "out", "m").bias == needs_of_checkpoint(spec).bias == bias_bytes(4, 1, 1)

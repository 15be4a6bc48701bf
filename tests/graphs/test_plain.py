"""Attention spelled out in standard operators, with the same values, for engines with their own fusions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest

from builder.checkpoints.resolve import resolve
from builder.common.errors import ExportError
from builder.engines import Infer, infer_with
from builder.engines.openvino import convert, signature
from builder.engines.optimise.half_precision import to_half
from builder.engines.plain_attention import spell_out_attention
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph, save_graph
from builder.options import make_spec
from tests.tiny_encoders import make_checkpoint


@pytest.mark.parametrize("model_type", ["bert", "mpnet", "deberta-v2", "modernbert", "albert", "eurobert"])
def test_plain_graph_answers_like_the_fused_one(model_type: str, tmp_path: Path) -> None:
    """Padding masks, position biases, windows, shared layers and grouped queries, also for OpenVINO and TensorRT."""
    folder = make_checkpoint(tmp_path / "checkpoint", model_type, "feature-extraction")
    spec = make_spec(model=str(folder))
    graph = export(resolve(spec), tmp_path).graph
    plain = spell_out_attention(graph, tmp_path)
    model = onnx.load(str(plain.path))
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert [entry.domain for entry in model.opset_import] == [""]
    assert plain.operators["Softmax"] == 2
    converted = convert(plain, tmp_path / "ir" / "model.xml", "fp32", half_weights=False)
    signature_found = signature(converted.path)
    assert (tuple(signature_found.inputs), tuple(signature_found.outputs)) == (plain.inputs, plain.outputs)
    assert [file.name for file in converted.files] == ["model.bin", "model.xml"]
    prepared = for_tensorrt(plain, tmp_path)
    assert not prepared.operators["Gelu"]
    half = to_half(prepared, tmp_path / "half" / "model.onnx")
    engines = [(infer_with(plain, 1), 1e-4), (_exactly(converted), 1e-4)]
    engines += [(infer_with(prepared, 1), 1e-4), (infer_with(half, 1), 2e-2)]
    for lengths in ([5], [3, 30, 17], [40, 2]):
        mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
        ids = np.random.default_rng(0).integers(5, 500, mask.shape) * mask
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        feed = {name: feed[name] for name in graph.inputs}
        expected = infer_with(graph, 1)(feed)[graph.outputs[0]][mask.astype(bool)]
        for engine, tolerance in engines:
            actual = engine(feed)[graph.outputs[0]][mask.astype(bool)]
            np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())


def _exactly(graph: Graph) -> Infer:
    """Run OpenVINO in fp32 on any CPU, unlike Triton, to compare the conversion without rounding."""
    model = openvino.Core().compile_model(str(graph.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feed: {name: model(feed)[name] for name in graph.outputs}


def test_spell_out_attention_names_an_unknown_operator(tmp_path: Path) -> None:
    node = onnx.helper.make_node("FastGelu", ["x"], ["y"], domain="com.microsoft")
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", tensors[:1], tensors[1:])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    saved = save_graph(onnx.helper.make_model(graph, opset_imports=opsets), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"com\.microsoft FastGelu has no standard form"):
        spell_out_attention(saved, tmp_path)


def test_for_tensorrt_names_an_unknown_operator(tmp_path: Path) -> None:
    node = onnx.helper.make_node("FastGelu", ["x"], ["y"], domain="com.microsoft")
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", tensors[:1], tensors[1:]), opset_imports=opsets)
    with pytest.raises(ExportError, match="TensorRT has no FastGelu"):
        for_tensorrt(save_graph(model, tmp_path / "model.onnx"), tmp_path)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_for_tensorrt_spells_gelu_out_exactly(approximate: str, tmp_path: Path) -> None:
    node = onnx.helper.make_node("Gelu", ["x"], ["y"], approximate=approximate)
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", tensors[:1], tensors[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    saved = save_graph(model, tmp_path / "model.onnx")
    feed = {"x": np.linspace(-6, 6, 101, dtype=np.float32)}
    spelled = for_tensorrt(saved, tmp_path)
    assert not spelled.operators["Gelu"]
    np.testing.assert_allclose(infer_with(spelled, 1)(feed)["y"], infer_with(saved, 1)(feed)["y"], atol=1e-6)

"""Half precision, and the operators that must not use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.building.verify.generation import make_reference, measure
from builder.common.errors import SpecError, VerificationError
from builder.engines.cuda import KERNELS, without_kernel
from builder.engines.cuda.decoding import decoder_for_cuda
from builder.engines.decoding import opened
from builder.engines.onnxruntime import infer, open_session, run_with
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import to_half
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.rounding import rounded
from tests.decoders import make_decoder
from tests.graphs.test_decoders import prompts
from tests.tiny_encoders import VOCABULARY


def graph_of(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], inputs: list[tuple[str, int]], folder: Path
) -> Graph:
    """Return a graph with one output, `out`, with explicit types of the values between, as the exporter writes them."""
    between = [name for node in nodes for name in node.output if name not in ("out", "rows")]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(values, name) for name, values in constants.items()],
            value_info=[helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in between],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    return save_graph(model, folder / "exact" / "model.onnx")


def test_half_precision_keeps_angles_of_late_positions_exact(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["positions"], ["real"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["real", "frequencies"], ["angles"], name="angles"),
        helper.make_node("Cos", ["angles"], ["cosines"], name="cos"),
        helper.make_node("Sin", ["angles"], ["sines"], name="sin"),
        helper.make_node("Add", ["cosines", "sines"], ["sum"], name="sum"),
        helper.make_node("Mul", ["sum", "weights"], ["out"], name="out"),
    ]
    constants = {"frequencies": np.array([1.0, 0.1], np.float32), "weights": np.array([1.0, 0.5], np.float32)}
    exact = graph_of(nodes, constants, [("positions", TensorProto.INT64)], tmp_path)
    feeds = {"positions": np.array([[1], [2049], [30001]])}
    wanted = run_with(open_session(exact.path, 1))(feeds)["out"]
    half = to_half(exact, tmp_path / "half" / "model.onnx")
    actual = run_with(open_session(half.path, 1))(feeds)["out"]
    assert np.abs(actual - wanted).max() < 3e-3, "30001 in fp16 would be 30000, one radian off"
    model = onnx.load(str(half.path))
    assert (
        numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "frequencies")).dtype == np.float32
    )
    assert numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "weights")).dtype == np.float16


def test_half_precision_keeps_large_squares_in_fp32(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "weights"], ["scaled"], name="scaled"),
        helper.make_node("Pow", ["scaled", "two"], ["squares"], name="squares"),
        helper.make_node("ReduceMean", ["squares"], ["mean"], name="mean"),
        helper.make_node("Sqrt", ["mean"], ["out"], name="root"),
    ]
    constants = {"weights": np.array([1.5], np.float32), "two": np.array(2, np.float32)}
    exact = graph_of(nodes, constants, [("x", TensorProto.FLOAT)], tmp_path)
    half = to_half(exact, tmp_path / "half" / "model.onnx")
    actual = run_with(open_session(half.path, 1))({"x": np.full((2, 3), 400, np.float32)})["out"]
    np.testing.assert_allclose(actual, 600, rtol=1e-3)


def test_half_precision_does_not_round_indices(tmp_path: Path) -> None:
    """For example buckets of relative positions: 8 + log(n / 8) / log(16) * 8 is 15.998 for 127, not 16."""
    nodes = [
        helper.make_node("Cast", ["distances"], ["real"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Log", ["real"], ["logs"], name="logs"),
        helper.make_node("Mul", ["logs", "scale"], ["places"], name="places"),
        helper.make_node("Cast", ["places"], ["rows"], name="rows", to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "rows"], ["picked"], name="picked"),
        helper.make_node("Mul", ["picked", "weights"], ["out"], name="out"),
    ]
    scale = np.array([8 / np.log(16)], np.float32)
    constants = {"scale": scale, "table": np.arange(30, dtype=np.float32), "weights": np.array([1.0], np.float32)}
    exact = graph_of(nodes, constants, [("distances", TensorProto.INT64)], tmp_path)
    feeds = {"distances": np.arange(1, 1000)}
    half = to_half(exact, tmp_path / "half" / "model.onnx")
    actual, wanted = (run_with(open_session(graph.path, 1))(feeds)["out"] for graph in (half, exact))
    np.testing.assert_array_equal(actual, wanted)


def test_overflow_of_fp16_shows_on_a_cpu(tmp_path: Path) -> None:
    """Regression: ONNX Runtime's CPU provider computes fp16 in fp32: 1e8 passed, which is infinity on a GPU."""
    nodes = [
        helper.make_node("Mul", ["x", "weights"], ["large"], name="large"),
        helper.make_node("Sub", ["large", "offset"], ["less"], name="less"),
        helper.make_node("Div", ["less", "weights"], ["out"], name="out"),
    ]
    constants = {"weights": np.array([3000.0], np.float32), "offset": np.array([1.0], np.float32)}
    exact = graph_of(nodes, constants, [("x", TensorProto.FLOAT)], tmp_path)
    half = to_half(exact, tmp_path / "half" / "model.onnx")
    judged = infer(replace(half, arithmetic="fp16"), 1)
    assert np.isinf(judged({"x": np.array([30000.0], np.float32)})["out"]).all()
    assert np.isfinite(run_with(open_session(half.path, 1))({"x": np.array([30000.0], np.float32)})["out"]).all()
    small = judged({"x": np.array([1.7], np.float32)})["out"]
    steps = np.float16(np.float16(np.float16(1.7) * np.float16(3000)) - np.float16(1)) / np.float16(3000)
    np.testing.assert_array_equal(small, np.float32(np.float16(steps)))


def test_rounded_graph_rounds_scaled_products_too(tmp_path: Path) -> None:
    """Regression: dequantised values were not rounded, and 127 * 0.1 was computed in fp32."""
    scale = numpy_helper.from_array(np.array(0.1, np.float16), "scale")
    tensors = [
        helper.make_tensor_value_info(name, kind, [None])
        for name, kind in (("x", TensorProto.INT8), ("out", TensorProto.FLOAT16))
    ]
    node = helper.make_node("DequantizeLinear", ["x", "scale"], ["out"], name="real")
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:], [scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    judged = infer(replace(save_graph(model, tmp_path / "model.onnx"), arithmetic="fp16"), 1)
    numbers = np.arange(-128, 128).astype(np.int8)
    wanted = (numbers.astype(np.float32) * np.float32(np.float16(0.1))).astype(np.float16)
    np.testing.assert_array_equal(judged({"x": numbers})["out"], wanted.astype(np.float32))


def test_rounded_takes_types_from_the_graph() -> None:
    """Regression: the type of the first input was used, so an fp16 result of an fp32 input was not rounded."""
    kinds = {"x": TensorProto.FLOAT, "y": TensorProto.FLOAT16}
    tensors = [helper.make_tensor_value_info(name, kind, [1]) for name, kind in kinds.items()]
    node = helper.make_node("Mixed", ["x"], ["y"], domain="tests")
    model = rounded(helper.make_model(helper.make_graph([node], "g", tensors[:1], tensors[1:])))
    assert [node.op_type for node in model.graph.node] == ["Mixed", "Cast", "Cast"]


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2_moe"])
def test_decoder_is_judged_in_fp16_as_a_gpu_rounds(model_type: str, tmp_path: Path) -> None:
    """Without the rounding, results would be those of fp32; values beyond fp16 give NaN."""
    model = make_decoder(model_type)
    exported = export_decoder(model, tmp_path, 64)
    _, judged = decoder_for_cuda(fuse(exported.graph, tmp_path), "fp16", "26.06", True, tmp_path)
    reference = make_reference(model, prompts()[:2])
    agreement = measure(opened(judged, 1), exported.caches, VOCABULARY, reference, "float32")
    assert 1e-6 < agreement.error < 0.3
    assert agreement.mean > 0.9
    large = load_graph(judged.path)
    table = next(t for t in large.graph.initializer if list(t.dims) == [VOCABULARY, 32])
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) * np.float32(1e7), table.name))
    wrong = save_graph(large, tmp_path / "large" / "model.onnx")
    with pytest.raises(
        VerificationError, match="fp16, which ends at 65504, choose a --precision of wider range that its engine has"
    ):
        measure(opened(wrong, 1), exported.caches, VOCABULARY, reference, "float32")


def test_bf16_is_judged_in_rounded_fp32(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "weights"], ["out"], name="out")]
    exact = graph_of(nodes, {"weights": np.array([1.001, 3.0], np.float32)}, [("x", TensorProto.FLOAT)], tmp_path)
    half = to_half(exact, tmp_path / "half" / "model.onnx", "bf16")
    assert half.arithmetic == "bf16"
    model = onnx.load(str(half.path))
    assert {tensor.data_type for tensor in model.graph.initializer} == {TensorProto.BFLOAT16}
    actual = infer(half, 1)({"x": np.array([1.0, 1.01], np.float32)})["out"]
    np.testing.assert_array_equal(actual, np.array([1.0, 3.03125], np.float32))  # 1.0078125 * 3, to 8 bits


def test_without_kernel_names_operators_that_cuda_lacks() -> None:
    operators = ["MultiHeadAttention", "MatMul", "BiasGelu"]
    assert without_kernel(operators, "bf16", "25.10", in_process=False) == ["MultiHeadAttention"]
    assert without_kernel(["GroupQueryAttention"], "fp32", "25.10", in_process=False) == ["GroupQueryAttention"]
    assert without_kernel(["GroupQueryAttention", "MultiHeadAttention"], "fp16", "24.10", in_process=False) == []
    assert all({"MultiHeadAttention", "GroupQueryAttention", "MatMul"} <= set(table) for table in KERNELS.values())


def test_kernels_are_those_of_the_runtime_that_serves() -> None:
    """Regression: the release's own backend was asked, so that bf16 decoders in process were refused before 25.08."""
    attention = ["GroupQueryAttention"]
    assert without_kernel(attention, "bf16", "25.07", in_process=True) == []
    with pytest.raises(SpecError, match=r"use --precision fp16, or --triton 25.08 or later"):
        without_kernel(attention, "bf16", "25.07", in_process=False)

"""int8: products are quantised and the quality suffices, or nothing is published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from builder.building.pipeline import build
from builder.checkpoints.resolve import resolve
from builder.common import machine
from builder.common.errors import VerificationError
from builder.common.machine import largest_byte_weight
from builder.engines import graph_engine
from builder.engines.onnxruntime import open_session
from builder.engines.optimise.activations import watch
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.quantisation import candidates, quantise, sensitivity
from builder.engines.optimise.static_quantisation import quantise_statically
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.encoder import Export, export
from builder.graphs.onnx.graph import Graph, save_graph
from builder.options import make_spec
from tests.models import minilm


@pytest.fixture(scope="module")
def fused(module_folder: Callable[[str], Path]) -> Graph:
    folder = module_folder("fused")
    spec = make_spec(model=str(minilm()))
    exported: Export = export(resolve(spec), folder)
    return fuse(exported.graph, folder)


@pytest.fixture
def feeds() -> list[dict[str, np.ndarray]]:
    ids = np.random.default_rng(0).integers(1000, 20000, (2, 12))
    return [{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}]


def test_quantise_covers_all_products_and_the_word_table(fused: Graph, tmp_path: Path) -> None:
    result = quantise(fused, tmp_path / "int8" / "model.onnx")
    assert (result.matmuls, result.embeddings, result.left_alone) == (36, 1, ())
    assert result.graph.operators["MatMulInteger"] == 36
    assert result.graph.operators["MatMul"] == 0
    assert result.graph.operators["MultiHeadAttention"] == 6
    assert result.graph.size < 0.3 * fused.size
    weights = {t.name: t for t in onnx.load(str(result.graph.path)).graph.initializer}
    scales = [t for name, t in weights.items() if name.endswith("_scale") and t.dims and t.dims[0] > 1]
    assert len(scales) == 36, "one scale for each output channel"


def test_sensitive_layers_come_first_and_stay_in_fp32(
    fused: Graph, feeds: list[dict[str, np.ndarray]], tmp_path: Path
) -> None:
    layers = candidates(fused)
    errors = sensitivity(fused, layers, feeds)
    ranked = list(errors)
    assert set(ranked) == set(layers)
    assert sorted(errors.values(), reverse=True) == list(errors.values())
    result = quantise(fused, tmp_path / "int8" / "model.onnx", ranked[:2])
    assert result.graph.operators["MatMulInteger"] == 36 - sum(layers[name] == "MatMul" for name in ranked[:2])
    assert result.left_alone == tuple(ranked[:2])


@pytest.mark.parametrize(
    ("shapes", "read"),
    [
        ([(1, 8), (8, 16)], [(1, 8), (2, 16)]),
        ([(8, 4), (1, 8)], [(8, 4), (1, 8)]),
        ([(1, 15), (1, 16), (1, 17), (1, 18)], [(1, 15), (1, 17)]),
        ([(2, 50), (1, 60)], [(1, 50)]),
    ],
)
def test_sensitivity_reads_a_bounded_number_of_tokens(
    shapes: list[tuple[int, int]], read: list[tuple[int, int]], fused: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one row of every call was read, 33 GB of inputs with a decoder of 0.6B and 20 texts of 2048 tokens.

    The first rows of calls are read, one at least; 40 tokens at most, if a row of the first call has no more.
    """
    monkeypatch.setattr("builder.engines.optimise.quantisation.SENSITIVITY_TOKENS", 40)
    seen: list[tuple[int, ...]] = []

    def watching(model: onnx.ModelProto, names: list[str], feeds: list[dict[str, np.ndarray]]) -> object:
        seen.extend(feed["input_ids"].shape for feed in feeds)
        return watch(model, names, feeds)

    monkeypatch.setattr("builder.engines.optimise.quantisation.watch", watching)
    calls = [np.random.default_rng(0).integers(1000, 20000, shape) for shape in shapes]
    feeds = [{"input_ids": c, "attention_mask": np.ones_like(c), "token_type_ids": np.zeros_like(c)} for c in calls]
    sensitivity(fused, candidates(fused), feeds)
    assert seen == read


def test_quantiser_that_quantised_nothing_is_an_error(fused: Graph, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="0 of 0 matrix products were quantised"):
        quantise(fused, tmp_path / "int8" / "model.onnx", list(candidates(fused)))


@pytest.mark.parametrize("limit", [100_000_000, 1_000])
def test_quantise_rounds_weights_like_onnx_runtime_s_own(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products of one input, one with a zero column, after a lookup; weights inline or external."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", limit)
    monkeypatch.setattr("builder.engines.optimise.quantisation.EMBEDDING_BYTES", 1_000)
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(300, 24)).astype(np.float32) for name in ("table", "left", "right")}
    weights["left"] = weights["left"][:24] * 3 - 1
    weights["right"] = np.where(np.arange(24) == 5, 0, weights["right"][24:48]).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"], "words"),
        helper.make_node("Gelu", ["words"], ["hidden"], "hidden", domain="com.microsoft"),
        helper.make_node("MatMul", ["hidden", "left"], ["one"], "one"),
        helper.make_node("MatMul", ["hidden", "right"], ["other"], "other"),
    ]
    real, rows = onnx.TensorProto.FLOAT, ["rows", "tokens"]
    outputs = [helper.make_tensor_value_info(name, real, [*rows, 24]) for name in ("one", "other")]
    inputs = [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, rows)]
    made = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(w, n) for n, w in weights.items()])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=9)
    quantize_dynamic(
        onnx.ModelProto.FromString(model.SerializeToString()),
        tmp_path / "theirs.onnx",
        op_types_to_quantize=["MatMul", "Gather"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        reduce_range=largest_byte_weight() < 127,
        extra_options={"DefaultTensorType": real},
    )
    graph = save_graph(model, tmp_path / "real" / "model.onnx")
    result = quantise(graph, tmp_path / "int8" / "model.onnx")
    assert (result.matmuls, result.embeddings) == (2, 1)
    assert len(result.graph.files) == (2 if limit == 1_000 else 1)
    feed = {"ids": random.integers(0, 300, (3, 7))}
    ours, theirs = (
        open_session(path, threads=1).run(None, feed) for path in (result.graph.path, tmp_path / "theirs.onnx")
    )
    for mine, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, their)


def test_build_below_its_quality_publishes_nothing(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "model_repository"
    options = {"model": str(checkpoint("names")), "name": "names", "output": output}
    build(make_spec(**options))
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
    with pytest.raises(VerificationError, match="Nothing was published"):
        build(make_spec(**options, precision="int8", quality=1.0))
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["model_repository"]


@pytest.mark.parametrize("precision", ["int8", "int8-static", "weights"])
def test_graph_needs_the_cpu_that_multiplied_its_bytes(
    precision: str, fused: Graph, feeds: list[dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 8 bits overflow without VNNI; what was verified without it, or in 7 bits, runs everywhere."""
    spec = make_spec(model="org/encoder")

    def made(flags: list[str]) -> Graph:
        monkeypatch.setattr(machine, "cpu", lambda: {"model": "a CPU", "flags": flags})
        path = tmp_path / "-".join(flags) / "model.onnx"
        if precision == "int8":
            return quantise(fused, path).graph
        if precision == "int8-static":
            return quantise_statically(fused, path, spec.calibration, feeds).graph
        return quantise_weights(fused, "int8", spec.weight_options, path.parent).graph

    engine = graph_engine("onnxruntime")
    seven, eight = made(["avx2"]), made(["avx2", "avx_vnni"])
    assert engine.needed_cpus(eight) == machine.VNNI
    assert engine.needed_cpus(fused) == ()  # real numbers
    assert engine.needed_cpus(seven) == (machine.VNNI if precision == "int8-static" else ())
    monkeypatch.setattr(machine, "cpu", lambda: {"model": "a CPU", "flags": ["avx2"]})
    assert engine.needed_cpus(eight) == ()


@pytest.mark.parametrize(("flags", "largest"), [(["avx2"], 64), (["avx2", "avx512_vnni"], 127), ([], 127)])
def test_weights_take_seven_bits_where_products_saturate(
    flags: list[str], largest: int, fused: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: on AVX2 without VNNI, sums of two products exceeded 16 bits and answers were off by several %."""
    monkeypatch.setattr(machine, "cpu", lambda: {"model": "a CPU", "flags": flags})
    result = quantise(fused, tmp_path / "model.onnx")
    weights = {tensor.name: tensor for tensor in onnx.load(str(result.graph.path)).graph.initializer}
    matrices = [values for name, values in weights.items() if values.data_type == onnx.TensorProto.INT8]
    assert max(int(np.abs(numpy_helper.to_array(matrix).astype(int)).max()) for matrix in matrices) == largest

"""Each precision on each engine is really used, answers correctly, and is refused where it is unsupported."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from transformers import PreTrainedTokenizerBase

from builder.building.families.encoder import Encoder
from builder.building.variants.candidates import VariantMaker, requested_variants
from builder.checkpoints.resolve import resolve
from builder.common.errors import ExportError, SpecError
from builder.common.machine import cpu
from builder.common.samples import TEXTS
from builder.engines import infer_with
from builder.engines.encoding import Variant, all_variants
from builder.engines.openvino import arithmetic_on
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph, load_graph, load_whole, save_graph
from builder.options import make_spec
from tests.length_batches import Feed, batches, features
from tests.models import minilm

BF16_CPU = ("avx512_vnni", "avx512_bf16")
LEAST = {  # mean cosine to fp32 over texts without those for calibration
    "fp32": 0.999999,
    "fp16": 0.9999,
    "bf16": 0.9999,
    "int8": 0.985,
    "int8-static": 0.995,
    "fp8": 0.99,
    "int8-weights": 0.998,
    "int4-weights": 0.95,
}
BYTES = {"fp32": 1.01, "fp16": 0.51, "bf16": 0.51, "int8": 0.27, "int8-static": 0.27, "int8-weights": 0.3}
# TensorRT has no 8-bit tables: half of MiniLM's weights are one, in fp16 or, by ONNX Runtime's TensorRT, fp32.
BYTES_IN_TENSORRT = {"int8-static TensorRT": 0.39, "fp8 TensorRT": 0.39, "int8-static TensorRT by ONNX Runtime": 0.66}


@functools.cache
def judged() -> list[Feed]:
    """Return every other text; the rest is for calibration."""
    return batches(_tokenizer(), TEXTS[1::2])


def _tokenizer() -> PreTrainedTokenizerBase:
    return resolve(make_spec(model=str(minilm()))).tokenizer


@pytest.fixture(scope="module")
def maker(module_folder: Callable[[str], Path]) -> VariantMaker:
    """Return a maker of MiniLM's variants, calibrated on every other text."""
    folder = module_folder("variants")
    spec = make_spec(model=str(minilm()), triton="25.08")  # the first whose bf16 kernels for CUDA are known
    return VariantMaker(spec, export(resolve(spec), folder).graph, folder, batches(_tokenizer(), TEXTS[::2]))


@pytest.fixture(scope="module")
def graph_of(maker: VariantMaker) -> Callable[[Variant], Graph]:
    """Return a function that returns the graph of a variant, created at its first use."""
    return functools.cache(lambda variant: maker.make(variant).graph)


@pytest.fixture(scope="module")
def expected(maker: VariantMaker) -> np.ndarray:
    return features(maker.fused, judged())


@pytest.mark.slow
@pytest.mark.parametrize("variant", all_variants(), ids=lambda variant: variant.name)
def test_variant_answers_like_fp32_and_has_the_expected_size(
    variant: Variant, maker: VariantMaker, graph_of: Callable[[Variant], Graph], expected: np.ndarray
) -> None:
    graph = graph_of(variant)
    assert graph.engine == variant.engine
    if (variant.name, arithmetic_on(cpu()["flags"])) == ("fp32 OpenVINO", "bf16"):
        with pytest.raises(ExportError, match=r"computes in bf16 on this CPU .* verified in f32"):
            features(graph, judged())
        return
    actual = features(graph, judged())
    assert (actual * expected).sum(axis=-1).mean() >= LEAST[variant.precision]
    share = BYTES_IN_TENSORRT.get(variant.name, BYTES.get(variant.precision, 0.25))
    assert graph.size <= share * maker.exported.size
    if variant.precision != "fp32":
        assert np.abs(actual - expected).max() > 1e-6, "it is not fp32 under another name"


@pytest.mark.parametrize(("requested", "expected_size"), [(None, 128), (64, 64)])
def test_int8_weights_have_the_requested_or_the_fastest_blocks(
    requested: int | None, expected_size: int, maker: VariantMaker, tmp_path: Path
) -> None:
    spec = make_spec(model=str(minilm()), block_size=requested)
    made = replace(maker, spec=spec, folder=tmp_path, verified=maker.fused)
    graph = load_graph(made.make(Variant("int8-weights", "onnxruntime")).graph.path).graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    sizes = {a.i for node in products for a in node.attribute if a.name == "block_size"}
    assert sizes == {expected_size}


def test_static_int8_answer_is_independent_of_its_batch(graph_of: Callable[[Variant], Graph]) -> None:
    graph = graph_of(Variant("int8-static", "onnxruntime"))
    feed = judged()[-1]
    alone = {name: array[:1] for name, array in feed.items()}
    np.testing.assert_allclose(features(graph, [feed])[:1], features(graph, [alone]), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "calibration",
    [
        {"method": "entropy"},
        {"method": "percentile"},
        {"symmetric": True},
        {"per_channel": False},
        {"smooth": 0.0},
    ],
    ids=str,
)
def test_static_int8_with_each_calibration_method(
    calibration: dict[str, object], maker: VariantMaker, expected: np.ndarray, tmp_path: Path
) -> None:
    spec = make_spec(model="minilm", calibration=calibration)
    quantised = VariantMaker(spec, maker.exported, tmp_path, maker.feeds).make(
        Variant("int8-static", "onnxruntime"), ()
    )
    model = onnx.load(str(quantised.graph.path))
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert len(products) == quantised.matmuls == 36
    smoothed = sum(node.name.endswith(".smoothed") for node in model.graph.node)
    assert smoothed == (0 if calibration.get("smooth") == 0.0 else 24), "one for each input of products"
    tables = {tensor.name: tensor for tensor in model.graph.initializer}
    scales = [tables[n.input[1]] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in tables]
    assert all((len(scale.dims) == 1) == calibration.get("per_channel", True) for scale in scales)
    zero = [tables[n.input[2]] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    signed = {tensor.data_type == onnx.TensorProto.INT8 for tensor in zero}
    assert signed == {bool(calibration.get("symmetric", False))}
    assert (features(quantised.graph, judged()) * expected).sum(axis=-1).mean() >= (
        0.97 if spec.calibration.per_channel else 0.8
    )


LOST = (Variant("int8", "onnxruntime"), Variant("fp16", "openvino"), Variant("int8-static", "openvino"))


def test_discarded_variants_leave_no_files(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds only graphs that can still be served, and the fp32 weights once."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 10_000)
    spec = make_spec(model=str(checkpoint("topics")), calibration={"smooth": 0.0})
    resolved = resolve(spec)
    exported = export(resolved, tmp_path).graph
    tiny = VariantMaker(spec, exported, tmp_path, batches(resolved.tokenizer, TEXTS[:2]))
    exact = [tiny.make(Variant("fp32", "onnxruntime")).graph, tiny.plain]
    weights = exported.path.with_name("model.onnx.data")
    assert all(graph.path.with_name("model.onnx.data").samefile(weights) for graph in exact)
    before = _files(tmp_path)
    made = {variant: tiny.make(variant) for variant in LOST}
    more = _files(tmp_path) - before
    assert {file.suffix for file in more if "openvino" in str(file)} == {".xml", ".bin"}, "no graph on the way to it"
    assert len(more) > 2 * len(LOST) - 1
    for variant, quantised in made.items():
        tiny.discard(variant, quantised)
    tiny.discard(Variant("fp32", "onnxruntime"), tiny.make(Variant("fp32", "onnxruntime")))
    assert _files(tmp_path) == before
    assert infer_with(exact[0], 1)(dict(tiny.feeds[0]))


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_smoothing_keeps_values_and_improves_quality(
    maker: VariantMaker, graph_of: Callable[[Variant], Graph], expected: np.ndarray
) -> None:
    rough = make_spec(model="minilm", calibration={"smooth": 0.0})
    variant = Variant("int8-static", "onnxruntime")
    (maker.folder / "rough").mkdir()
    without = VariantMaker(rough, maker.exported, maker.folder / "rough", maker.feeds).make(variant).graph
    with_smoothing = graph_of(variant)
    losses = [1 - (features(graph, judged()) * expected).sum(axis=-1).mean() for graph in (without, with_smoothing)]
    assert losses[1] < losses[0] / 2


def test_graph_option_accepts_a_published_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache links the weights file too, and onnx's own reader refuses hard links."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 1000)
    weights = np.arange(4096, dtype=np.float32).reshape(64, 64)
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 64]) for name in "xy")
    product = helper.make_node("MatMul", ["x", "weights"], ["y"])
    made = helper.make_graph([product], "g", [x], [y], [numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    own = save_graph(model, tmp_path / "own" / "model.onnx")
    os.link(own.path.with_name("model.onnx.data"), tmp_path / "kept")
    spec = make_spec(model="model", graph=own.path)
    given = VariantMaker(spec, own, tmp_path / "first", []).own_graph
    (tensor,) = load_whole(given.path).graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights)
    own.path.with_name("model.onnx.data").unlink()
    with pytest.raises(SpecError, match=r"own/model\.onnx cannot be read as ONNX: .*model\.onnx\.data"):
        _ = VariantMaker(spec, own, tmp_path / "second", []).own_graph


def test_measurement_key_covers_all_files_of_the_given_graph(tmp_path: Path) -> None:
    """Regression: changed external weights with the same nodes reused the cached quality."""
    graph = tmp_path / "model.onnx"
    weight = numpy_helper.from_array(np.ones(2, np.float32), "weight")
    onnx.external_data_helper.set_external_data(weight, "model.onnx.data")
    graph.write_bytes(helper.make_model(helper.make_graph([], "g", [], [], [weight])).SerializeToString())
    encoder: Any = SimpleNamespace(
        spec=make_spec(model="model", graph=graph), checkpoint=SimpleNamespace(identity=lambda: "checkpoint")
    )
    evaluator: Any = SimpleNamespace(samples=(), labels=(), feeds=())
    facts = []
    for weights in (b"one", b"other"):
        (tmp_path / "model.onnx.data").write_bytes(weights)
        facts.append(Encoder._facts(encoder, evaluator))
    assert facts[0] != facts[1]


def test_optimisation_levels_select_fusions(maker: VariantMaker) -> None:
    """O1 keeps small operators, O2 fuses them, O3 approximates GELU; all levels fuse attention."""
    by_level = {}
    for level in ("O1", "O2", "O3"):
        spec = make_spec(model="minilm", level=level)
        by_level[level] = VariantMaker(spec, maker.exported, maker.folder, ()).make(all_variants()[0]).graph.operators
    assert all(operators["MultiHeadAttention"] == 6 for operators in by_level.values())
    assert (by_level["O1"]["BiasGelu"], by_level["O1"]["Gelu"]) == (0, 6)
    assert by_level["O2"]["BiasGelu"] == 6
    assert (by_level["O3"]["FastGelu"], by_level["O3"]["BiasGelu"]) == (6, 0)


def test_requested_variants_of_options() -> None:
    def names(**options: object) -> list[str]:
        return [variant.name for variant in requested_variants(make_spec(model="minilm", **options), BF16_CPU)]

    assert names() == ["fp32"]
    assert names(precision="bf16") == ["bf16 OpenVINO"]
    assert names(precision="int8-static") == ["int8-static"]
    assert names(precision="int8-static", engine="openvino") == ["int8-static OpenVINO"]
    assert names(precision="int8-static", engine="auto") == ["int8-static", "int8-static OpenVINO"]
    assert names(precision="int8-weights") == ["int8-weights"]
    assert names(precision="int8-weights", engine="auto") == ["int8-weights", "int8-weights OpenVINO"]
    assert names(precision="auto", engine="onnxruntime") == ["fp32", "int8", "int8-static"]
    assert names(precision="auto", engine="openvino") == [
        "bf16 OpenVINO",
        "int8-static OpenVINO",
        "int8-weights OpenVINO",
    ]
    assert names(level="O4") == ["fp16"]
    with pytest.raises(SpecError, match="onnxruntime has no bf16 on a CPU; openvino has"):
        names(precision="bf16", engine="onnxruntime")
    with pytest.raises(SpecError, match="openvino has no int8 on a CPU; onnxruntime has"):
        names(precision="int8", engine="openvino")
    with pytest.raises(SpecError, match="OpenVINO multiplies in bf16, and Triton's backend has no parameter for fp32"):
        names(precision="fp32", engine="openvino")
    auto = [variant.name for variant in requested_variants(make_spec(model="minilm", precision="auto"), BF16_CPU)]
    assert "fp32 OpenVINO" not in auto
    assert "bf16 OpenVINO" in auto
    with pytest.raises(SpecError, match="none of avx512_bf16, amx_bf16"):
        requested_variants(make_spec(model="minilm", precision="bf16"), ("avx2",))
    assert "bf16 OpenVINO" not in [
        v.name for v in requested_variants(make_spec(model="minilm", precision="auto"), ("avx2",))
    ]
    with pytest.raises(SpecError, match="O4 is O3 in fp16"):
        make_spec(model="minilm", level="O4", precision="int8")

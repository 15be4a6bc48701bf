"""An encoder with sinks, a band and mixtures of experts: one operator each a layer, equal to PyTorch at any length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from builder.building.families.encoder import Encoder
from builder.building.families.encoder.results import ExportedEncoder
from builder.building.pipeline import build
from builder.building.variants.candidates import VariantMaker
from builder.building.verify.parity import error_at, reference
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.common.errors import ExportError, VerificationError
from builder.common.machine import cpu
from builder.common.samples import TEXTS
from builder.engines import Infer, infer_with
from builder.engines.encoding import Variant, all_variants, encoding_engine
from builder.engines.openvino import convert
from builder.graphs.export.encoder import Export, export
from builder.graphs.export.experts import cost_of_experts
from builder.graphs.export.rows import rows_of
from builder.graphs.onnx.experts import run_all_experts
from builder.graphs.onnx.graph import Graph, check_release
from builder.options import make_spec
from builder.runtime.open_vino import openvino
from tests.length_batches import Feed, batches
from tests.privacy_filters import BAND, make_privacy_filter

LAYERS, EXPERTS = 2, 8
HERE = cpu()["flags"]
ON_CPU = [
    variant
    for variant in all_variants()
    if variant.target == "cpu" and encoding_engine(variant.engine).unable(variant.precision, HERE) is None
]
LARGEST_ERROR = {"fp32": 1e-5, "int4-weights": 0.2}  # mean, of the largest logit; 0.015 for 8 and 16 bits


@pytest.fixture(scope="module")
def filtering(module_folder: Callable[[str], Path]) -> tuple[Checkpoint, Export, Path]:
    folder = module_folder("experts")
    checkpoint = resolve(make_spec(model=str(make_privacy_filter(folder / "checkpoint"))))
    return checkpoint, export(checkpoint, folder), folder


LENGTHS = [
    *([length] for length in (1, 2, BAND, BAND + 1, 2 * BAND - 1, 2 * BAND, 2 * BAND + 1, 3 * BAND, 300, 511, 512)),
    [5, 5, 5],
    [3, 40, 17],  # padded
    [1, 200],
    [1, 2, 16],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention_equals_pytorch_at_any_length(
    lengths: list[int], filtering: tuple[Checkpoint, Export, Path], engines: list[Graph], openvino_in_fp32: Infer
) -> None:
    """Alone and in batches, up to one block and beyond, with ONNX Runtime's operators and with standard ones."""
    checkpoint, exported, _ = filtering
    expected = reference(exported.module, rows_of(checkpoint), lengths)
    for graph in engines:
        assert error_at(infer_with(graph, 1), graph, expected, per_token=True) < 1e-5
    assert error_at(openvino_in_fp32, engines[1], expected, per_token=True) < 1e-5


@pytest.fixture(scope="module")
def engines(filtering: tuple[Checkpoint, Export, Path]) -> list[Graph]:
    """Return the graph fused for ONNX Runtime, and the one that engines with their own fusions read."""
    checkpoint, exported, folder = filtering
    maker = VariantMaker(make_spec(model="x"), exported.graph, folder, feeds(checkpoint))
    return [maker.fused, maker.plain]


@pytest.fixture(scope="module")
def openvino_in_fp32(filtering: tuple[Checkpoint, Export, Path], engines: list[Graph]) -> Infer:
    """Return OpenVINO's answers to the graph of standard operators, in fp32 on every CPU.

    Regression: it pads with zero where the value to pad with is computed, so that no token saw the sink.
    """
    path = convert(engines[1], filtering[2] / "fp32" / "model.xml", "fp32", half_weights=False).path
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(str(path)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: {"logits": compiled(dict(feeds))["logits"]}


def test_every_attention_is_one_operator(filtering: tuple[Checkpoint, Export, Path], engines: list[Graph]) -> None:
    _, exported, _ = filtering
    assert (exported.attentions, exported.layers, exported.warning) == (LAYERS, LAYERS, None)
    assert [graph.operators["MultiHeadAttention"] for graph in engines] == [LAYERS, 0]


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [(7, (2, 1, 7, 8)), (16, (2, 1, 16, 17)), (17, (4, 1, 16, 33)), (512, (64, 1, 16, 33))],
)
def test_scores_of_a_token_do_not_grow_with_the_text(
    tokens: int, shape: tuple[int, ...], filtering: tuple[Checkpoint, Export, Path], tmp_path: Path
) -> None:
    """A token of a long text meets its block, the band on both sides and the sink."""
    _, exported, _ = filtering
    model = onnx.load(str(exported.graph.path))
    biases = {node.input[5] for node in model.graph.node if node.op_type == "MultiHeadAttention"}
    assert len(biases) == 1  # computed once for all layers
    model.graph.output.append(onnx.helper.make_tensor_value_info(biases.pop(), onnx.TensorProto.FLOAT, [None] * 4))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.ones((2, tokens), np.int64)
    assert session.run(None, {"input_ids": ids, "attention_mask": ids})[-1].shape == shape


def test_heads_of_older_engines_have_a_bias_each(
    filtering: tuple[Checkpoint, Export, Path], engines: list[Graph], tmp_path: Path
) -> None:
    """ONNX Runtime before 1.20 does not share a bias among heads."""
    checkpoint, exported, _ = filtering
    shared = run_all_experts(engines[0], tmp_path)
    check_release(shared, "24.12")
    with pytest.raises(ExportError, match=r"a bias for all heads.* Build for Triton 24\.12"):
        check_release(shared, "24.11")
    stages = Encoder(make_spec(model="x", triton="24.11", executor="bls"), checkpoint, tmp_path, ())
    graph = stages.fuse(ExportedEncoder(exported, ())).graph
    check_release(graph, "24.11")
    assert graph.operators["MultiHeadAttention"] == LAYERS
    expected = reference(exported.module, rows_of(checkpoint), [3, 40, 17])
    assert error_at(infer_with(graph, 1), graph, expected, per_token=True) < 1e-5


def test_gpus_read_scores_in_place_of_masks(filtering: tuple[Checkpoint, Export, Path], tmp_path: Path) -> None:
    checkpoint, exported, _ = filtering
    spread = run_all_experts(exported.graph, tmp_path)
    graph = encoding_engine("onnxruntime").source(spread, "cuda", tmp_path)
    expected = reference(exported.module, rows_of(checkpoint), [3, 40, 17])
    assert error_at(infer_with(graph, 1), graph, expected, per_token=True) < 1e-5


def test_norms_are_one_operator_each(engines: list[Graph]) -> None:
    """Regression: they ran as six operators, of which ONNX Runtime fused none."""
    assert engines[0].operators["SimplifiedLayerNormalization"] == 2 * LAYERS + 1
    assert not engines[0].operators["ReduceMean"]


def feeds(checkpoint: Checkpoint) -> list[Feed]:
    return batches(checkpoint.tokenizer, TEXTS[:8])


def test_graph_reads_the_chosen_experts_alone(filtering: tuple[Checkpoint, Export, Path]) -> None:
    """The weights of experts are read by the operator alone, and nothing runs expert by expert."""
    checkpoint, exported, _ = filtering
    graph = onnx.load(str(exported.graph.path)).graph
    assert exported.graph.operators["MoE"] == LAYERS
    assert cost_of_experts(checkpoint.model, exported.graph.operators) is None
    assert not {"Loop", "Scan", "If", "NonZero", "ScatterND", "ScatterElements"} & set(exported.graph.operators)
    stacked = {tensor.name for tensor in graph.initializer if EXPERTS in tensor.dims[:1] and len(tensor.dims) == 3}
    readers = [node.op_type for node in graph.node for name in node.input if name in stacked]
    assert (len(stacked), set(readers)) == (2 * LAYERS, {"MoE"})
    side_by_side = EXPERTS * checkpoint.config.intermediate_size
    assert not [tensor.name for tensor in graph.initializer if side_by_side in tensor.dims]


@pytest.mark.parametrize("variant", ON_CPU, ids=lambda variant: variant.name)
def test_experts_keep_their_answers_in_each_precision(
    variant: Variant, filtering: tuple[Checkpoint, Export, Path], tmp_path: Path
) -> None:
    checkpoint, exported, _ = filtering
    spec = make_spec(model="x", block_size=32)
    made = VariantMaker(spec, exported.graph, tmp_path, feeds(checkpoint)).make(variant)
    experts = "MoE" if variant.precision in ("fp32", "fp16", "bf16") else "QMoE"
    assert made.graph.operators[experts] == LAYERS
    if variant.engine == "openvino":
        assert made.graph.path.read_text("utf-8").count('type="GroupedMatMul"') == 2 * LAYERS
    infer, errors, largest = infer_with(made.graph, 1), [], 0.0
    for feed in feeds(checkpoint):
        with torch.no_grad():
            expected = checkpoint.model(**{name: torch.from_numpy(values) for name, values in feed.items()}).logits
        own = feed["attention_mask"].astype(bool)
        errors.append(np.abs(infer(feed)["logits"] - expected.numpy())[own].mean())
        largest = max(largest, float(expected.abs().max()))
    assert max(errors) < LARGEST_ERROR.get(variant.precision, 0.015) * largest


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, True),
        ({"triton": "25.06", "executor": "bls"}, False),  # ONNX Runtime 1.22
        ({"target": "cuda"}, False),
    ],
)
def test_engines_without_the_operator_run_every_expert(
    options: dict[str, str], sparse: bool, filtering: tuple[Checkpoint, Export, Path], tmp_path: Path
) -> None:
    checkpoint, exported, _ = filtering
    stages = Encoder(make_spec(model="x", **options), checkpoint, tmp_path, ())
    fused = stages.fuse(ExportedEncoder(exported, ()))
    assert (fused.graph.operators["MoE"], fused.compacted.operators["MoE"]) == (LAYERS * sparse,) * 2


@pytest.mark.parametrize("precision", ["bf16", "int8-static"])
def test_openvino_of_any_version_runs_every_expert(
    precision: str, filtering: tuple[Checkpoint, Export, Path], tmp_path: Path
) -> None:
    """The OpenVINO of a Triton release may lack the operator, which is new."""
    checkpoint, exported, _ = filtering
    spec = make_spec(model="x", engine="openvino", executor="bls")
    graph = VariantMaker(spec, exported.graph, tmp_path, feeds(checkpoint)).make(Variant(precision, "openvino")).graph
    assert not graph.operators["MoE"] + graph.operators["QMoE"]
    assert "GroupedMatMul" not in graph.path.read_text("utf-8")


def test_experts_of_older_engines_are_quantised_as_products(
    filtering: tuple[Checkpoint, Export, Path], tmp_path: Path
) -> None:
    """ONNX Runtime 1.23.2, of Python 3.10, has the operator for fp32 weights alone."""
    checkpoint, exported, _ = filtering
    maker = VariantMaker(make_spec(model="x", triton="24.10"), exported.graph, tmp_path, feeds(checkpoint))
    assert maker.fused.operators["MoE"] == LAYERS
    for precision, product in (("int8", "MatMulInteger"), ("int4-weights", "MatMulNBits")):
        operators = maker.make(Variant(precision, "onnxruntime")).graph.operators
        assert (operators["MoE"], operators["QMoE"]) == (0, 0)
        assert operators[product] >= 2 * LAYERS


@pytest.mark.slow
def test_rounded_experts_pass_the_gate_or_are_refused(
    filtering: tuple[Checkpoint, Export, Path], tmp_path: Path
) -> None:
    """Random weights keep fewer labels than a build requires by default."""
    options = {"model": str(filtering[0].folder), "name": "private", "precision": "int8-weights", "output": tmp_path}
    with pytest.raises(VerificationError, match=r"token label agreement .* 0\.9900 is required"):
        build(make_spec(**options))
    report = build(make_spec(**options, quality=0.9))
    assert (report.operators["QMoE"], report.operators["MultiHeadAttention"]) == (LAYERS, LAYERS)
    assert report.chosen == "int8-weights"

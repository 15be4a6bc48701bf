"""Encoders with mixtures of experts: one operator a layer, in each precision that a CPU has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from builder.building.families.encoder import Encoder
from builder.building.families.encoder.results import ExportedEncoder
from builder.building.variants.candidates import VariantMaker
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.common.machine import cpu
from builder.common.samples import TEXTS
from builder.engines import infer_with
from builder.engines.encoding import Variant, all_variants, encoding_engine
from builder.graphs.export.encoder import Export, export
from builder.graphs.export.experts import cost_of_experts
from builder.options import make_spec
from tests.length_batches import Feed, batches
from tests.privacy_filters import make_privacy_filter

LAYERS, EXPERTS = 2, 8
HERE = cpu()["flags"]
ON_CPU = [
    variant
    for variant in all_variants()
    if variant.target == "cpu" and encoding_engine(variant.engine).unable(variant.precision, HERE) is None
]
LARGEST_ERROR = {"fp32": 1e-5, "int4-weights": 0.2}  # mean, of the largest logit; 0.03 for 8 and 16 bits


@pytest.fixture(scope="module")
def filtering(module_folder: Callable[[str], Path]) -> tuple[Checkpoint, Export, Path]:
    folder = module_folder("experts")
    checkpoint = resolve(make_spec(model=str(make_privacy_filter(folder / "checkpoint"))))
    return checkpoint, export(checkpoint, folder), folder


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
    quantised = variant.precision not in ("fp32", "fp16") and variant.engine == "onnxruntime"
    experts = "QMoE" if quantised else "MoE"
    assert made.graph.operators[experts] == (LAYERS if variant.engine == "onnxruntime" else 0)
    infer, errors, largest = infer_with(made.graph, 1), [], 0.0
    for feed in feeds(checkpoint):
        with torch.no_grad():
            expected = checkpoint.model(**{name: torch.from_numpy(values) for name, values in feed.items()}).logits
        own = feed["attention_mask"].astype(bool)
        errors.append(np.abs(infer(feed)["logits"] - expected.numpy())[own].mean())
        largest = max(largest, float(expected.abs().max()))
    assert max(errors) < LARGEST_ERROR.get(variant.precision, 0.03) * largest


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

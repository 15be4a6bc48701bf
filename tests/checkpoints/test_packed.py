"""GPTQ and AWQ checkpoints are unpacked exactly and served with their own codes; unknown formats are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from builder.building.families.generating import rounded_experts
from builder.building.pipeline import build
from builder.checkpoints.grids import Grids
from builder.checkpoints.resolve import resolve
from builder.common.errors import CheckpointError, SpecError
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.nodes import attributes_of
from builder.options import WeightOptions, make_spec
from builder.repository.report.record import BuildReport
from tests.decoders import make_decoder_checkpoint
from tests.packing import pack_checkpoint
from tests.quantised_experts import weights_of

BITS = ("bits", 4)
FORMS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq", "bits": 4, "size": 16},
    "gptq, zero points": {"method": "gptq", "bits": 4, "size": 32, "symmetric": False},
    "gptq of version 2": {"method": "gptq", "bits": 4, "size": 16, "symmetric": False, "version": 2},
    "gptq of 8 bits": {"method": "gptq", "bits": 8, "size": 32},
    "gptq, inputs in any order": {"method": "gptq", "bits": 4, "size": 16, "shuffled": True},
    "awq": {"method": "awq", "bits": 4, "size": 16, "symmetric": False},
}


def decoder(folder: Path, **form: Any) -> tuple[Path, dict[str, Any]]:
    checkpoint = make_decoder_checkpoint(folder, "llama")
    return checkpoint, pack_checkpoint(checkpoint, **form)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_packed_weights_are_unpacked_to_the_original(form: dict[str, Any], tmp_path: Path) -> None:
    folder, written = decoder(tmp_path / "checkpoint", **form)
    checkpoint = resolve(make_spec(model=str(folder), task="text-generation"))
    weights = dict(checkpoint.model.named_parameters())
    assert len(written) == 14, "two layers of seven matrices"
    for name, codes in written.items():
        np.testing.assert_array_equal(weights[f"{name}.weight"].detach().numpy(), codes.weights)
    assert checkpoint.grids is not None
    assert checkpoint.grids.scattered == bool(form.get("shuffled"))


EXPERTS: dict[str, dict[str, Any]] = {
    "gptq of 8 bits": {"method": "gptq", "bits": 8, "size": 32, "symmetric": False},
    "gptq, a scale an output": {"method": "gptq", "bits": 4, "size": 64},
    "awq": {"method": "awq", "bits": 4, "size": 16, "symmetric": False},
}


@pytest.mark.parametrize("form", EXPERTS.values(), ids=EXPERTS)
def test_packed_experts_are_served_with_their_own_codes(form: dict[str, Any], tmp_path: Path) -> None:
    """QMoE's codes, scales and zero points are the checkpoint's: they give its weights to the last bit."""
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64}
    folder = make_decoder_checkpoint(tmp_path / "checkpoint", "qwen3_moe", num_hidden_layers=1, **sizes)
    written = pack_checkpoint(folder, **form)
    assert len(written) == 4 + 3 * 4, "attention, and four experts of three matrices"
    checkpoint = resolve(make_spec(model=str(folder), task="text-generation"))
    graph = fuse(export_decoder(checkpoint.model, tmp_path, 64).graph, tmp_path)
    precision, options = f"int{form['bits']}-weights", WeightOptions(32, symmetric=True)
    quantised = quantise_weights(graph, precision, options, tmp_path, checkpoint.grids)
    assert quantised.graph.operators["QMoE"] == 1
    assert rounded_experts([quantised]) is None
    assert quantised.as_stored == quantised.graph.operators["MatMulNBits"] + 1 - (
        form["bits"] == 8
    )  # the output matrix
    before, after = weights_of(graph), weights_of(quantised.graph)
    assert len(after) == 2
    for name, weights in after.items():
        np.testing.assert_array_equal(weights, before[name])
    (node,) = [node for node in onnx.load(str(quantised.graph.path)).graph.node if node.op_type == "QMoE"]
    attributes = attributes_of(node)
    assert (attributes["expert_weight_bits"], attributes["block_size"]) == (form["bits"], form["size"])
    assert (len(node.input) > 11) != form.get("symmetric", True), "no zero points where all are in the middle"


def test_expert_without_packed_codes_is_rounded_to_8_bits(tmp_path: Path) -> None:
    folder = make_decoder_checkpoint(tmp_path / "checkpoint", "qwen3_moe", moe_intermediate_size=32)
    pack_checkpoint(folder, "gptq", 4, 16, skipped="layers.1.mlp.experts.2.down_proj")
    checkpoint = resolve(make_spec(model=str(folder), task="text-generation"))
    graph = fuse(export_decoder(checkpoint.model, tmp_path, 64).graph, tmp_path)
    quantised = quantise_weights(graph, "int4-weights", WeightOptions(32, True), tmp_path, checkpoint.grids)
    nodes = [node for node in onnx.load(str(quantised.graph.path)).graph.node if node.op_type == "QMoE"]
    assert [attributes_of(node)["expert_weight_bits"] for node in nodes] == [4, 8]
    before, after = weights_of(graph), weights_of(quantised.graph)
    exact = [np.array_equal(before[name], weights) for name, weights in after.items()]
    assert exact == [True, True, False, False]
    assert quantised.rounded_experts == 1
    remark = rounded_experts([quantised])
    assert remark is not None
    assert "1 mixtures of experts were rounded to 8 bits" in remark
    for name, weights in after.items():
        np.testing.assert_allclose(weights, before[name], atol=0.02 * np.abs(before[name]).max())


def test_packed_experts_answer_as_pytorch(tmp_path: Path) -> None:
    """A build compares greedy texts in fp32, and serves the codes of experts and of other matrices."""
    folder = make_decoder_checkpoint(tmp_path / "checkpoint", "qwen3_moe", moe_intermediate_size=32)
    pack_checkpoint(folder, **FORMS["gptq"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"-:.*mlp.gate": {}}  # as GPTQModel says that routers are left alone
    (folder / "config.json").write_text(json.dumps(config))
    output = tmp_path / "repository"
    spec = make_spec(model=str(folder), name="m", output=output, precision="int4-weights", quality=0.0, perplexity=9.0)
    report = build(spec)
    assert report.quantised is not None
    assert report.quantised["as_stored"] == 2 * 3, "queries, keys and values together, the output of attention, experts"


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def served(
    request: pytest.FixtureRequest, module_folder: Callable[[str], Path]
) -> tuple[BuildReport, onnx.ModelProto, dict[str, Any]]:
    """Build an AWQ checkpoint with its own 4-bit codes and zero points."""
    folder, codes = decoder(module_folder("awq") / "checkpoint", **FORMS["awq"])
    output = folder.parent / "repository"
    options: dict[str, Any] = {"precision": "int4-weights", "quality": 0.0, "perplexity": 9.0, "target": request.param}
    report = build(make_spec(model=str(folder), name="m", output=output, **options))
    return report, onnx.load(str(output / "m" / "1" / "model.onnx")), codes


def test_packed_checkpoint_is_served_with_its_own_codes(
    served: tuple[BuildReport, onnx.ModelProto, dict[str, Any]],
) -> None:
    """Every matrix in the graph has the codes, scales and zero points of the checkpoint."""
    report, model, written = served
    assert report.chosen is not None
    assert report.chosen.startswith("int4-weights")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [n for n in model.graph.node if n.op_type == "MatMulNBits" for a in n.attribute if (a.name, a.i) == BITS]
    matched = set()
    for node in nodes:
        codes, scales, zeros = (tensors[name] for name in node.input[1:])
        low_first = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
        offsets = np.stack([zeros & 15, zeros >> 4], -1).reshape(len(zeros), -1)[:, : scales.shape[1]]
        for row in zip(low_first, scales, offsets, strict=True):
            matched.add(tuple(part.astype(np.float32).tobytes() for part in row))
    for codes in written.values():
        for row in zip(codes.codes, codes.scales, codes.zeros, strict=True):
            assert tuple(part.astype(np.float32).tobytes() for part in row) in matched
    assert report.quantised is not None
    assert report.quantised["matmuls"] == len(nodes) + 1, "the output matrix, which has no grid, is in 8 bits"


def test_packed_checkpoint_answers_like_the_unpacked_one(
    served: tuple[BuildReport, onnx.ModelProto, dict[str, Any]],
) -> None:
    """Weights are not rounded again: only 8-bit or fp16 activations and the output matrix differ from PyTorch."""
    report, _, _ = served
    (measured,) = [measured for measured in report.variants if measured.name == report.chosen]
    assert measured.perplexity == pytest.approx(report.variants[0].perplexity, rel=0.02)


def test_packed_groups_are_split_into_the_engines_blocks() -> None:
    grids, rng = Grids(4), np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (8, 512)), rng.uniform(0.1, 1, (8, 2)).astype(np.float32)
    weights = (codes - 8).astype(np.float32) * scales.repeat(256, axis=1)
    grids.add(weights, scales, np.full((8, 2), 8, np.uint8), np.arange(512) // 256)
    for largest in (256, 128):
        blocks = grids.blocks(weights.T, largest)
        assert blocks is not None
        assert blocks.codes.shape == (8, 512 // largest, largest // 2)
        np.testing.assert_array_equal(blocks.scales, scales.repeat(256 // largest, axis=1))


def test_options_that_contradict_a_packed_checkpoint_are_refused(tmp_path: Path) -> None:
    folder, _ = decoder(tmp_path / "checkpoint", **FORMS["gptq, inputs in any order"])
    spec = make_spec(model=str(folder), task="text-generation", precision="int4-weights")
    with pytest.raises(SpecError, match="inputs that are not adjacent"):
        resolve(spec)
    folder, _ = decoder(tmp_path / "other", **FORMS["gptq"])
    with pytest.raises(SpecError, match="--block-size: the checkpoint's own blocks are served"):
        resolve(make_spec(model=str(folder), task="text-generation", precision="int4-weights", block_size=64))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "stored as bitsandbytes .* or run this one with"),
        ({"quant_method": "gptq", "bits": 3}, "gptq weights of 3 bits; expected 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the format gemv; expected"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*gate": {}, "+:.*": {"bits": 8}}},
            "quantises some modules by other rules",
        ),
        ({"quant_method": "gptq", "bits": 4}, "no weight is stored in that form: there is no qweight"),
    ],
)
def test_unknown_packed_formats_are_refused_by_name(stated: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    with pytest.raises(CheckpointError, match=message):
        resolve(make_spec(model=str(folder), task="text-generation"))

"""gpt-oss in mxfp4, as it is published, is read and served without its weights being rounded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

from builder.building.families.generating import not_as_stored
from builder.building.pipeline import build
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.grids import SharedExponents
from builder.checkpoints.resolve import resolve
from builder.common.errors import CheckpointError
from builder.engines.onnxruntime import infer
from builder.engines.optimise.experts import quantised_experts
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.experts import run_all_experts
from builder.graphs.onnx.graph import load_graph, save_graph
from builder.graphs.onnx.nodes import replace_nodes
from builder.graphs.onnx.weights import computing
from builder.options import WeightOptions, make_spec
from builder.serving.plan.needs import needs_of
from tests.decoders import make_decoder_checkpoint
from tests.graphs.test_experts import layer_graph
from tests.packing import pack_mxfp4
from tests.quantised_experts import weights_of
from tests.tiny_encoders import VOCABULARY


@pytest.fixture(scope="module")
def folder(module_folder: Callable[[str], Path]) -> Path:
    checkpoint = make_decoder_checkpoint(module_folder("mxfp4") / "checkpoint", "gpt_oss")
    pack_mxfp4(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return resolve(make_spec(model=str(folder), task="text-generation"))


def dequantised(folder: Path) -> PreTrainedModel:
    """Return the model as transformers unpacks it."""
    unpacked = Mxfp4Config(dequantize=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=unpacked, dtype=torch.float32
    )
    return model


def test_mxfp4_weights_equal_those_of_transformers(folder: Path, checkpoint: Checkpoint) -> None:
    expected, actual = dequantised(folder).state_dict(), checkpoint.model.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == torch.float32
        assert torch.equal(actual[name], tensor), name
    experts = expected["model.layers.0.mlp.experts.down_proj"]
    assert len(experts.abs().log2().floor().unique()) > 4, "several exponents"


def test_mxfp4_weights_are_mapped_from_a_file(checkpoint: Checkpoint) -> None:
    """Unpacked weights take no memory of their own."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in maps if line.endswith("model.safetensors (deleted)")]
    pointer = checkpoint.model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").data_ptr()
    assert any(int(start, 16) <= pointer < int(end, 16) for start, end in places)


@pytest.mark.parametrize("precision", ["int8-weights", "int8"])
def test_mxfp4_experts_are_served_as_stored(precision: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The codes of 8 bits times their scales are the weights, whatever block was asked for."""
    graph = fuse(export_decoder(checkpoint.model, tmp_path, 128).graph, tmp_path)
    options = WeightOptions(64, symmetric=False)
    quantised = quantise_weights(graph, precision, options, tmp_path, checkpoint.grids)
    assert quantised.as_stored == 2
    assert quantised.graph.operators["QMoE"] == 2
    before, after = weights_of(graph), weights_of(quantised.graph)
    assert len(after) == 4
    for name, weights in after.items():
        np.testing.assert_array_equal(weights, before[name])
    others = quantise_weights(graph, "int4-weights", options, tmp_path, checkpoint.grids)
    assert others.as_stored == 0


def test_mxfp4_experts_equal_pytorch_where_activations_are_not_rounded(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only activations are rounded: the kernel that leaves them alone gives PyTorch's numbers."""
    monkeypatch.setenv("ORT_QMOE_CPU_QNBIT_GEMM", "fp32")
    layer, graph = layer_graph(checkpoint.model, tmp_path)
    with computing():
        model = load_graph(graph.path)
        options = WeightOptions(32, symmetric=True)
        nodes = [
            quantised_experts(model.graph, node, 8, options, checkpoint.grids).node if node.op_type == "MoE" else node
            for node in model.graph.node
        ]
        replace_nodes(model.graph, nodes)
        drop_unused(model.graph)
        quantised = save_graph(model, tmp_path / "quantised.onnx")
    assert quantised.operators["QMoE"] == 1
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = layer(x).numpy()
    np.testing.assert_allclose(infer(quantised, 1)({"x": x.numpy()})["y"], expected, rtol=1e-4, atol=1e-5)


def test_mxfp4_experts_that_all_run_are_served_as_stored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Engines without the operator multiply by the same codes."""
    graph = run_all_experts(fuse(export_decoder(checkpoint.model, tmp_path, 128).graph, tmp_path), tmp_path)
    quantised = quantise_weights(graph, "int8-weights", WeightOptions(32, True), tmp_path, checkpoint.grids)
    assert quantised.as_stored == 2 * 2


@pytest.mark.parametrize("shape", [(1, 1), (2, 9)])
def test_mxfp4_logits_equal_transformers(folder: Path, checkpoint: Checkpoint, shape: tuple[int, int]) -> None:
    tokens = torch.randint(5, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = (model(input_ids=tokens).logits for model in (dequantised(folder), checkpoint.model))
    torch.testing.assert_close(actual, expected)


def test_mxfp4_checkpoint_answers_as_transformers(folder: Path, tmp_path: Path) -> None:
    """The build compares greedy texts with those of PyTorch, whose weights are those of transformers."""
    report = build(make_spec(model=str(folder), name="m", output=tmp_path, precision="int8-weights", quality=0.0))
    assert report.quantised is not None
    assert report.quantised["as_stored"] == 2
    assert not any("mxfp4" in warning for warning in report.warnings)


@pytest.mark.parametrize(("precision", "remark"), [("fp32", True), ("int4-weights", True), ("int8", False)])
def test_larger_or_rounded_mxfp4_is_remarked(precision: str, remark: bool, checkpoint: Checkpoint) -> None:
    text = not_as_stored(precision, checkpoint)
    assert (text is not None) == remark
    assert text is None or "--precision int8-weights or int8 serves them as they are" in text


def test_plan_of_mxfp4_names_the_precisions_that_serve_it(folder: Path, tmp_path: Path) -> None:
    spec = make_spec(model=str(folder), output=tmp_path)
    exact, stored = needs_of(spec), needs_of(spec.model_copy(update={"precision": "int8-weights"}))
    assert exact.measured.endswith("(mxfp4): --precision int8-weights or int8 serves them as they are")
    assert "mxfp4" not in stored.measured
    assert stored.weights < 0.3 * exact.weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "has blocks but no scales: the checkpoint is incomplete"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, 1:].contiguous()}),
            r"the parts of .* do not fit: blocks are \(4, 128, 1, 16\) and scales \(4, 127, 1\)",
        ),
        (lambda tensors, name: tensors[f"{name}_scales"].fill_(255), "has an exponent of 255"),
    ],
)
def test_damaged_mxfp4_is_refused(
    change: Callable[[dict[str, torch.Tensor], str], object], message: str, tmp_path: Path
) -> None:
    folder = make_decoder_checkpoint(tmp_path / "checkpoint", "gpt_oss")
    pack_mxfp4(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        resolve(make_spec(model=str(folder), task="text-generation"))


def test_mxfp4_without_packed_experts_is_refused(tmp_path: Path) -> None:
    folder = make_decoder_checkpoint(tmp_path / "checkpoint", "gpt_oss")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match="no weight is stored in that form: there is no blocks"):
        resolve(make_spec(model=str(folder), task="text-generation"))


@pytest.mark.parametrize("exponent", [-140, -90, 0, 120])
def test_shared_exponents_have_exact_codes_or_none(exponent: int) -> None:
    rng = np.random.default_rng(0)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6], np.float32)
    matrix = np.ldexp(rng.choice(values, (64, 3)), exponent).astype(np.float32)
    matrix[:32, 0] = 0
    stored = SharedExponents()
    blocks = stored.blocks(matrix, 256)
    if exponent == -140:
        assert blocks is None, "a step that is no normal number"
        return
    assert blocks is not None
    codes = blocks.codes.astype(np.float32) - 128
    np.testing.assert_array_equal((codes * blocks.scales[..., None]).reshape(3, 64), matrix.T)
    assert stored.blocks(matrix, 16) is None
    assert stored.blocks(matrix[:48], 256) is None
    assert stored.blocks(rng.normal(size=(64, 3)).astype(np.float32), 256) is None

"""Mixtures of experts: the router's choice of each architecture, and graphs that read the chosen experts alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of, make_reference, measure
from builder.engines.decoding import opened
from builder.engines.onnxruntime import infer
from builder.engines.onnxruntime.decoding import OnnxRuntimeDecoding
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.architectures import fused_attention
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.experts import cost_of_experts, expert_layers, expert_weights
from builder.graphs.export.program import export_graph
from builder.graphs.export.sparse_experts import activation_of, sparse_experts
from builder.graphs.onnx.experts import INTO, order_experts, routers_of, run_all_experts
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.projections import spell_out_gemms
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from scripts.tiny_models import tiny_model
from tests.decoders import SIZES, make_decoder
from tests.graphs.test_decoders import NEW_TOKENS, exported, prompts
from tests.tiny_encoders import VOCABULARY

FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
DEEPSEEK = {**FEW, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 8}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {"q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
# A layer of each way to route and to activate, by model type.
LAYERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **DEEPSEEK,
        **GROUPS,
        **LATENT,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v3": {**DEEPSEEK, **GROUPS, **LATENT, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "swiglu_limit": 1.0},
    "lfm2_moe": {**FEW, "num_experts": 4, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2},
    "glm4_moe": {**FEW, **GROUPS, "n_routed_experts": 8, "head_dim": 8, "first_k_dense_replace": 0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**FEW, "num_experts": 4, "head_dim": 8, "norm_topk_prob": False},
    "qwen2_moe": {**FEW, "num_experts": 4, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


class Block(torch.nn.Module):
    """Mixture of experts `block` with its router, over (batch, sequence, hidden), which it reads once more."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result = self.block(torch.tanh(tensors[0]))
        return result[0] if isinstance(result, tuple) else result


class Layer(Block):
    """The mixture of experts of a model's first layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        experts = expert_layers(model)[0]
        names = dict(model.named_modules())
        name = next(name for name, module in names.items() if module is experts)
        super().__init__(names[name.rsplit(".", 1)[0]])


def model_of(model_type: str) -> PreTrainedModel:
    """Return a model with every bias of its routers and experts other than zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **LAYERS[model_type]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "bias" in name or "gate.weight" in name or "router" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return model


def layer_graph(model: PreTrainedModel, folder: Path) -> tuple[Layer, Graph]:
    layer = Layer(model)
    axes = [{0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}]
    with sparse_experts(model):
        graph = export_graph(folder / "m.onnx", layer, [torch.randn(2, 7, 32)], axes, ["x"], ["y"], order_experts)
    return layer, graph


@pytest.mark.parametrize("model_type", LAYERS)
def test_experts_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Compare one token and batches, as one operator and as every expert."""
    model = model_of(model_type)
    layer, graph = layer_graph(model, tmp_path)
    spread = run_all_experts(graph, tmp_path)
    assert (graph.operators["MoE"], spread.operators["MoE"]) == (1, 0)
    for shape in ((1, 1, 32), (3, 5, 32), (1, 64, 32)):
        x = torch.randn(shape) * 2
        with torch.no_grad():
            expected = layer(x).numpy()
        for one in (graph, spread):
            actual = infer(one, 1)({"x": x.numpy()})["y"]
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_activation_without_operator_runs_every_expert(tmp_path: Path) -> None:
    model = make_decoder("mixtral", hidden_act="gelu", num_hidden_layers=1)
    layer, graph = layer_graph(model, tmp_path)
    assert activation_of(expert_layers(model)[0]) is None
    assert graph.operators["MoE"] == 0
    assert run_all_experts(graph, tmp_path) is graph
    remark = cost_of_experts(model, graph.operators)
    assert remark is not None
    assert "1 of 1 mixtures of experts run all of their 4 experts for every token" in remark
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        np.testing.assert_allclose(infer(graph, 1)({"x": x.numpy()})["y"], layer(x).numpy(), rtol=1e-4, atol=1e-5)


def test_experts_of_a_class_of_their_own_are_counted() -> None:
    """Regression: DBRX's experts, which transformers does not dispatch, ran all of them without a word."""
    remark = cost_of_experts(tiny_model("CAUSAL_LM", "dbrx"), Counter())
    assert remark is not None
    assert "2 of 2 mixtures of experts run all of their 4 experts" in remark


def test_activation_of_experts_without_a_gate() -> None:
    layer = expert_layers(make_decoder("mixtral", num_hidden_layers=1))[0]
    layer.has_gate, layer.act_fn = False, torch.nn.ReLU()
    assert activation_of(layer) == {"activation_type": "relu"}
    layer.act_fn = torch.nn.Tanh()
    assert activation_of(layer) is None


def test_limit_of_an_activation_is_found_however_large() -> None:
    """Regression: values up to 16 were compared, and a limit beyond was left out of the operator."""
    layer = expert_layers(make_decoder("gpt_oss", swiglu_limit=40.0))[0]
    attributes = activation_of(layer)
    assert attributes is not None
    assert attributes["swiglu_limit"] == 40.0


@pytest.mark.parametrize("identity", [0.0, 10.0, -10.0])
def test_experts_that_return_a_token_are_added(identity: float, tmp_path: Path) -> None:
    """Routers choose some, no others, or none of the experts without weights, which the operator does not have."""
    model = make_decoder("longcat_flash", moe_topk=2)
    router = model.model.layers[0].mlp.router
    router.e_score_correction_bias[4:] = identity
    axes = [{0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}]
    layer = Block(model.model.layers[0].mlp)
    before = set(model.state_dict())
    with fused_attention(model), sparse_experts(model):
        graph = export_graph(tmp_path / "m.onnx", layer, [torch.randn(2, 7, 32)], axes, ["x"], ["y"], order_experts)
    assert set(model.state_dict()) == before
    assert graph.operators["MoE"] == 1
    (node,) = [node for node in onnx.load(str(graph.path)).graph.node if node.op_type == "MoE"]
    tensors = {tensor.name: tensor for tensor in onnx.load(str(graph.path)).graph.initializer}
    assert tensors[node.input[2]].dims[0] == 4
    for shape in ((1, 1, 32), (3, 5, 32)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected = layer(x).numpy()
            chosen = router(torch.tanh(x))[2]
        assert identity == 0 or bool((chosen >= 4).all()) == bool((chosen >= 4).any()) == (identity > 0)
        for one in (graph, run_all_experts(graph, tmp_path)):
            np.testing.assert_allclose(infer(one, 1)({"x": x.numpy()})["y"], expected, rtol=1e-4, atol=1e-5)
    remark = cost_of_experts(model, Counter({"MoE": 1}))
    assert remark is not None
    assert "1 of 2 mixtures of experts run all of their 4 experts" in remark


def test_router_that_names_no_expert_adds_nothing() -> None:
    weights = expert_weights(torch.tensor([[0, 4], [2, 2]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]]), 4)
    assert weights.tolist() == [[0.25, 0, 0, 0], [0, 0, 1.0, 0]]


def test_experts_keep_their_input_until_they_have_run(tmp_path: Path) -> None:
    """Regression: ONNX Runtime wrote the result over hidden states that the operator had yet to read."""
    _, graph = layer_graph(make_decoder("mixtral", num_hidden_layers=1), tmp_path)
    fused = fuse(graph, tmp_path / "fused")
    quantised = quantise_weights(fused, "int4-weights", WeightOptions(32, symmetric=True), tmp_path).graph
    for one, experts in ((graph, "MoE"), (fused, "MoE"), (quantised, "QMoE")):
        nodes = onnx.load(str(one.path)).graph.node
        places = {node.op_type: index for index, node in enumerate(nodes)}
        assert nodes[places[experts]].input[0] in nodes[places["Where"]].input
        assert places["Where"] > places[experts]


@pytest.mark.parametrize(("activation", "added"), [("silu", 0), ("gelu", 2)])
def test_export_restores_the_experts_of_transformers(activation: str, added: int) -> None:
    model = make_decoder("qwen2_moe", num_hidden_layers=1, hidden_act=activation)
    before = (model.get_experts_implementation(), set(model.state_dict()))
    with sparse_experts(model):
        assert len(model.state_dict()) == len(before[1]) + added
    assert (model.get_experts_implementation(), set(model.state_dict())) == before
    assert cost_of_experts(model, Counter({"MoE": 1})) is None
    assert cost_of_experts(make_decoder("llama"), Counter()) is None


def test_older_engines_run_every_expert(tmp_path: Path) -> None:
    """An older release's own engine has no such operator; the same release in process has it for fp32 weights."""
    graph, actual, expected = exported("olmoe", tmp_path)
    assert actual == expected
    assert graph.operators["MoE"] == SIZES["num_hidden_layers"]
    model = make_decoder("olmoe")
    fp32 = export_decoder(model, tmp_path, 128).graph
    old = OnnxRuntimeDecoding(make_spec(model="x", triton="25.06", executor="bls")).fuse(fp32, tmp_path / "old")
    assert old.operators["MoE"] == 0
    caches = geometry_of(export_decoder(model, tmp_path, 128).caches, 4, 128, VOCABULARY)
    assert generate(InProcess(old.path, caches, Session(threads=1)), prompts(), NEW_TOKENS) == actual
    first = OnnxRuntimeDecoding(make_spec(model="x", triton="24.10", slots=4))
    sparse = first.fuse(fp32, tmp_path / "first")
    assert sparse.operators["MoE"] == SIZES["num_hidden_layers"]
    assert first.lower(sparse, "int8", tmp_path / "first", None).graph.operators["QMoE"] == 0


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "int4-weights"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantised_experts_agree_as_those_that_all_run(precision: str, symmetric: bool, tmp_path: Path) -> None:
    model, options = make_decoder("qwen2_moe"), WeightOptions(32, symmetric)
    result = export_decoder(model, tmp_path, 128)
    reference = make_reference(model, prompts()[:3])
    graph = fuse(result.graph, tmp_path)
    errors = []
    for one, experts in ((graph, 2), (run_all_experts(graph, tmp_path), 0)):
        quantised = quantise_weights(one, precision, options, tmp_path)
        assert quantised.graph.operators["QMoE"] == experts
        assert quantised.graph.operators["MoE"] == 0
        assert quantised.graph.size < 0.4 * graph.size
        errors.append(measure(opened(quantised.graph, 1), result.caches, VOCABULARY, reference).error)
    assert 1e-4 < errors[0] < 2 * errors[1]


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "int4-weights"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "lfm2_moe", "llama4_text", "qwen2_moe"])
def test_quantised_decoders_choose_experts_in_fp32(model_type: str, precision: str, tmp_path: Path) -> None:
    """Regression: routers were rounded like any other product, and chose other experts than the checkpoint's.

    Those of Llama 4 read what its shared experts read, which are rounded all the same.
    """
    graph = fuse(export_decoder(make_decoder(model_type), tmp_path, 64).graph, tmp_path)
    experts = graph.operators["MoE"]
    assert experts
    before, after = (
        onnx.load(str(one.path)).graph
        for one in (graph, quantise_weights(graph, precision, WeightOptions(16, True), tmp_path).graph)
    )
    spell_out_gemms(before)  # fusion writes those of gpt-oss, which have biases, as Gemm
    routers = routers_of(before)
    assert len(routers) == experts
    products = {node.output[0]: node for node in after.node if node.op_type == "MatMul"}
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.initializer}
    original = {tensor.name: numpy_helper.to_array(tensor) for tensor in before.initializer}
    makers = {node.output[0]: node for node in before.node}
    for router in routers:
        matrix = kept[products[router].input[1]]
        assert matrix.dtype == np.float32
        np.testing.assert_array_equal(matrix, original[makers[router].input[1]])
    (count,) = {original[node.input[INTO]].shape[0] for node in before.node if node.op_type == "MoE"}
    assert {original[makers[router].input[1]].size for router in routers} == {count * SIZES["hidden_size"]}


def test_experts_of_no_whole_blocks_all_run(tmp_path: Path) -> None:
    model = make_decoder("olmoe", intermediate_size=24, num_hidden_layers=1)
    graph = fuse(export_decoder(model, tmp_path, 64).graph, tmp_path)
    assert graph.operators["MoE"] == 1
    quantised = quantise_weights(graph, "int4-weights", WeightOptions(32, True), tmp_path).graph
    assert (quantised.operators["MoE"], quantised.operators["QMoE"]) == (0, 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_experts_are_within_half_a_step(symmetric: bool, tmp_path: Path) -> None:
    graph = fuse(export_decoder(make_decoder("olmoe", num_hidden_layers=1), tmp_path, 64).graph, tmp_path)
    for bits, precision in ((8, "int8-weights"), (4, "int4-weights")):
        quantised = quantise_weights(graph, precision, WeightOptions(16, symmetric), tmp_path).graph
        before, after = (
            {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(one.path)).graph.initializer}
            for one in (graph, quantised)
        )
        node = next(node for node in onnx.load(str(quantised.path)).graph.node if node.op_type == "QMoE")
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert (attributes["expert_weight_bits"], attributes["block_size"]) == (bits, 16)
        for name in (node.input[2].removesuffix(".codes"), node.input[5].removesuffix(".codes")):
            codes, scales = after[f"{name}.codes"], after[f"{name}.scales"]
            zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else after[f"{name}.zeros"]
            if bits == 4:
                codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
                if not symmetric:
                    zeros = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(scales.shape)
            steps = codes.reshape(*scales.shape, 16) - zeros[..., None].astype(np.float32)
            error = np.abs(steps * scales[..., None] - before[name].reshape(*scales.shape, 16))
            assert (error <= 1.01 * np.abs(scales[..., None])).all()
            assert error.mean() < 0.3 * np.abs(scales).mean()

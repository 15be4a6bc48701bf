"""Mixtures of experts on OpenVINO: transformers' answers, by the weights of the chosen experts alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper, save

from builder.building.verify.generation import make_reference, measure
from builder.engines.decoding import opened
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.experts import quantised_experts
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.nodes import attributes_of
from builder.graphs.onnx.weights import computing, take_in
from builder.options import WeightOptions
from builder.runtime.open_vino import openvino
from builder.runtime.openvino_experts import expert_extensions
from tests.decoders import SIZES, make_decoder
from tests.engines.test_openvino_decoders import check_text_against_transformers, executor_of, paged
from tests.graphs.test_decoders import prompts
from tests.graphs.test_experts import LAYERS, layer_graph, model_of
from tests.tiny_encoders import VOCABULARY

HIDDEN, UNITS, EXPERTS, CHOSEN = 48, 32, 6, 2


def compiled(path: Path) -> openvino.CompiledModel:
    core = openvino.Core()
    core.add_extension(expert_extensions())
    return core.compile_model(core.read_model(str(path)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def layers_of(model: openvino.CompiledModel) -> Counter[str]:
    """Return how many nodes of each type the CPU plugin runs."""
    return Counter(node.get_rt_info()["layerType"].value for node in model.get_runtime_model().get_ops())


@pytest.mark.parametrize("model_type", LAYERS)
def test_experts_on_openvino_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    layer, graph = layer_graph(model_of(model_type), tmp_path)
    model = compiled(graph.path)
    assert layers_of(model)["GatherMatmul"] == 2
    for shape in ((1, 1, 32), (3, 5, 32), (1, 64, 32)):
        x = torch.randn(shape) * 2
        with torch.no_grad():
            expected = layer(x).numpy()
        np.testing.assert_allclose(model(x.numpy())[0], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def moe(activation: str, biased: bool) -> ModelProto:
    """Return a model of one MoE with random weights; its inputs are hidden states and router logits."""
    generator = np.random.default_rng(0)
    doubled = UNITS * (2 if activation == "swiglu" else 1)
    shapes = {"into": (EXPERTS, doubled, HIDDEN), "into_bias": (EXPERTS, doubled), "out": (EXPERTS, HIDDEN, UNITS),
              "out_bias": (EXPERTS, HIDDEN)}  # fmt: skip
    tensors = [
        numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32) / 6, name)
        for name, shape in shapes.items()
        if biased or "bias" not in name
    ]
    names = [tensor.name for tensor in tensors]
    inputs = ["x", "logits", *(name if name in names else "" for name in shapes)]
    attributes: dict[str, Any] = {"k": CHOSEN, "activation_type": activation}
    if activation == "swiglu":
        attributes |= {"swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 0.5}
    node = helper.make_node("MoE", inputs, ["y"], domain="com.microsoft", **attributes)
    sizes = {"x": HIDDEN, "logits": EXPERTS, "y": HIDDEN}
    x, logits, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["tokens", s]) for n, s in sizes.items())
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", [x, logits], [y], tensors), opset_imports=opsets)


def expected_of(model: ModelProto, x: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Compute the operator by its definition, one token and expert after the other, in float64."""
    node = model.graph.node[0]
    activation = attributes_of(node)["activation_type"].decode()
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    into, into_bias, out, out_bias = (values.get(name, 0) for name in node.input[2:])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    result = np.zeros((len(x), HIDDEN))
    for token, row in enumerate(x):
        for expert in np.argsort(-logits[token], kind="stable")[:CHOSEN]:
            units = into[expert] @ row + (into_bias[expert] if np.ndim(into_bias) else 0)
            units = out[expert] @ activated(activation, units)
            result[token] += weights[token, expert] * (units + (out_bias[expert] if np.ndim(out_bias) else 0))
    return result


def activated(activation: str, units: np.ndarray) -> np.ndarray:
    if activation == "swiglu":
        gate, linear = np.minimum(units[0::2], 0.5), np.clip(units[1::2], -0.5, 0.5)
        return gate / (1 + np.exp(-1.7 * gate)) * (linear + 1)
    one = torch.from_numpy(units)
    functions = torch.nn.functional
    return {
        "silu": functions.silu(one), "relu": functions.relu(one), "identity": one,
        "gelu": functions.gelu(one, approximate="tanh"),
    }[activation].numpy()  # fmt: skip


@pytest.mark.parametrize("activation", ["swiglu", "silu", "relu", "gelu", "identity"])
@pytest.mark.parametrize("biased", [True, False])
def test_translated_moe_computes_the_operator(activation: str, biased: bool, tmp_path: Path) -> None:
    """All tokens at one expert, experts without a token, and one token alone are computed too."""
    model = moe(activation, biased)
    save(model, tmp_path / "m.onnx")
    request, generator = compiled(tmp_path / "m.onnx"), np.random.default_rng(1)
    for tokens, spread in ((1, 1.0), (9, 1.0), (40, 3.0), (5, 0.0)):
        x = generator.standard_normal((tokens, HIDDEN)).astype(np.float32)
        logits = (generator.standard_normal((tokens, EXPERTS)) * spread + np.arange(EXPERTS)).astype(np.float32)
        np.testing.assert_allclose(request([x, logits])[0], expected_of(model, x, logits), rtol=1e-4, atol=1e-5)


def test_pairs_are_not_sorted_by_comparing_each_with_all(tmp_path: Path) -> None:
    """Regression: a stable sort compares each pair with all; of 1,000 tokens with 8 experts it took 130 ms a layer."""
    save(moe("silu", biased=False), tmp_path / "m.onnx")
    core = openvino.Core()
    core.add_extension(expert_extensions())
    nodes = core.read_model(str(tmp_path / "m.onnx")).get_ordered_ops()
    sorts = [node.get_attributes() for node in nodes if node.get_type_name() == "TopK"]
    assert [sort["stable"] for sort in sorts if sort["mode"] == "min"] == [False]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_translated_qmoe_multiplies_by_the_codes(bits: int, symmetric: bool, tmp_path: Path) -> None:
    """Three blocks of 16 inputs: an odd number of zero points, of which two share a byte in 4 bits."""
    exact = moe("swiglu", True)
    rounded = ModelProto()
    rounded.CopyFrom(exact)
    with computing():
        node = quantised_experts(rounded.graph, exact.graph.node[0], bits, WeightOptions(16, symmetric)).node
        take_in(rounded.graph)
    del rounded.graph.node[:]
    rounded.graph.node.append(node)
    save(rounded, tmp_path / "q.onnx")
    request, generator = compiled(tmp_path / "q.onnx"), np.random.default_rng(2)
    assert layers_of(request)["GatherMatmul"] == 2
    for tensor in exact.graph.initializer:
        if tensor.name in ("into", "out"):
            values = dequantised(rounded, tensor.name, bits, symmetric)
            assert np.abs(values - numpy_helper.to_array(tensor)).max() > 1e-4
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    x = generator.standard_normal((9, HIDDEN)).astype(np.float32)
    logits = generator.standard_normal((9, EXPERTS)).astype(np.float32)
    np.testing.assert_allclose(request([x, logits])[0], expected_of(exact, x, logits), rtol=1e-4, atol=1e-5)


def dequantised(model: ModelProto, name: str, bits: int, symmetric: bool) -> np.ndarray:
    """Return the matrices that the codes of `name` stand for, (experts, outputs, inputs)."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    codes, scales = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else tensors[f"{name}.zeros"]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)
        if not symmetric:
            zeros = np.stack([zeros & 15, zeros >> 4], -1).reshape(*zeros.shape[:2], -1)[..., : scales.shape[2]]
    steps = codes.reshape(*scales.shape, 16).astype(np.float32) - zeros[..., None]
    return (steps * scales[..., None]).reshape(*codes.shape[:2], -1).astype(np.float32)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_decoder_with_experts_reads_the_chosen_ones(model_type: str, tmp_path: Path) -> None:
    check_text_against_transformers(model_type, tmp_path)
    (tmp_path / "again").mkdir()
    exported, graph = paged(model_type, tmp_path / "again")
    assert graph.operators["MoE"] == SIZES["num_hidden_layers"]
    executor = executor_of(exported, graph, 1)
    layers = layers_of(executor.request.get_compiled_model())
    assert layers["GatherMatmul"] == 2 * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "int4-weights"])
def test_quantised_experts_on_openvino_keep_most_tokens(precision: str, tmp_path: Path) -> None:
    model = make_decoder("qwen2_moe")
    result = export_decoder(model, tmp_path, 128)
    graph = page_attention(result.graph, tmp_path)
    quantised: Graph = quantise_weights(graph, precision, WeightOptions(16, symmetric=False), tmp_path).graph
    assert quantised.operators["QMoE"] == SIZES["num_hidden_layers"]
    reference = make_reference(model, [prompt for prompt in prompts() if len(prompt) > 9])
    exact = measure(opened(graph, 1), result.caches, VOCABULARY, reference)
    rounded = measure(opened(quantised, 1), result.caches, VOCABULARY, reference)
    assert exact.mean == 1
    assert rounded.error > 1e-4
    assert rounded.mean > (0.5 if precision == "int4-weights" else 0.9)
    assert rounded.same_alone == 1

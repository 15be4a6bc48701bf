"""Check that engines compute a token of a mixture with the weights of its chosen experts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from builder.engines.onnxruntime import infer
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.onnx.graph import Graph
from builder.options import WeightOptions
from tests.decoders import make_decoder
from tests.engines.test_openvino_experts import compiled
from tests.graphs.test_experts import layer_graph

EXPERTS, CHOSEN = 64, 8
SHAPE = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": 32, "num_hidden_layers": 1}


def on_onnxruntime(graph: Graph, x: np.ndarray) -> np.ndarray:
    return infer(graph, 1)({"x": x})["y"]


def on_openvino(graph: Graph, x: np.ndarray) -> np.ndarray:
    result: np.ndarray = compiled(graph.path)(x)[0]
    return result


def poisoned(graph: Graph, experts: np.ndarray, path: Path) -> Graph:
    """Write `graph` to `path`, where no weight of `experts`, or no scale of its weights, is a number."""
    model = onnx.load(str(graph.path))
    (node,) = [node for node in model.graph.node if node.op_type in ("MoE", "QMoE")]
    count = 0
    for tensor in model.graph.initializer:
        if tensor.name in node.input and tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor).copy()
            values[experts] = np.nan
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
            count += 1
    assert count == 2  # into the experts and out of them
    onnx.save(model, str(path))
    return replace(graph, path=path)


@pytest.mark.parametrize("answer", [on_onnxruntime, on_openvino])
@pytest.mark.parametrize("precision", ["fp32", "int8-weights", "int4-weights"])
def test_weights_of_experts_that_no_token_chose_are_not_used(
    answer: Callable[[Graph, np.ndarray], np.ndarray], precision: str, tmp_path: Path
) -> None:
    """Weights that are not numbers spoil any sum that they are part of, one over all experts with weights of 0 too."""
    layer, graph = layer_graph(make_decoder("olmoe", **SHAPE), tmp_path)
    if precision != "fp32":
        graph = quantise_weights(graph, precision, WeightOptions(32, symmetric=True), tmp_path).graph
    for tokens in (1, 3):
        x = torch.randn(1, tokens, 32)
        with torch.no_grad():
            chosen = np.unique(layer.get_submodule("block.gate")(torch.tanh(x))[2])
        assert CHOSEN <= len(chosen) <= CHOSEN * tokens
        expected = answer(graph, x.numpy())
        assert np.isfinite(expected).all()
        others = np.setdiff1d(np.arange(EXPERTS), chosen)
        np.testing.assert_array_equal(answer(poisoned(graph, others, tmp_path / "o.onnx"), x.numpy()), expected)
        assert np.isnan(answer(poisoned(graph, chosen[-1:], tmp_path / "c.onnx"), x.numpy())).any()

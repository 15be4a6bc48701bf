"""Static int8: the result equals that of ONNX Runtime's own quantiser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static

from builder.common.errors import VerificationError
from builder.engines.optimise.static_quantisation import quantise_statically
from builder.graphs.onnx.graph import Graph, load_whole, save_graph
from builder.options import Calibration

METHODS = {"min-max": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
PRODUCTS = {"one": "left", "other": "right", "again": "left", "score": "last"}  # product: its matrix
IN_THE_GRAPH, BESIDE = 1 << 30, 1_000


class Calls(CalibrationDataReader):  # type: ignore[misc]
    """Calibration reader that gives `feeds` to ONNX Runtime's quantiser."""

    def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
        self.feeds = feeds
        self.pending: Iterator[dict[str, np.ndarray]] = iter(())

    def __len__(self) -> int:
        return len(self.feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.pending = iter(self.feeds[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.pending, None)


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    """Return a graph with shared inputs, a shared matrix, a zero column and a single column.

    A sum reads inputs of products too, and so does a product that can be left alone.
    """
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(24, 24)).astype(np.float32) for name in ("left", "right", "apart")}
    weights["right"] = np.where(np.arange(24) == 5, 0, weights["right"] * 3 - 1).astype(np.float32)
    weights["last"] = random.normal(size=(24, 1)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "left"], ["one"], "one"),
        helper.make_node("MatMul", ["x", "right"], ["other"], "other"),
        helper.make_node("Add", ["one", "other"], ["sum"], "sum"),
        helper.make_node("Tanh", ["sum"], ["hidden"], "hidden"),
        helper.make_node("MatMul", ["hidden", "apart"], ["apart.product"], "apart"),
        helper.make_node("MatMul", ["hidden", "left"], ["again"], "again"),
        helper.make_node("Add", ["hidden", "again"], ["residual"], "residual"),
        helper.make_node("Add", ["residual", "apart.product"], ["end"], "end"),
        helper.make_node("MatMul", ["end", "last"], ["score"], "score"),
    ]
    dims = ["rows", "tokens"]
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [*dims, 24])]
    outputs = [helper.make_tensor_value_info("score", onnx.TensorProto.FLOAT, [*dims, 1])]
    made = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(w, n) for n, w in weights.items()])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return save_graph(model, tmp_path / "real" / "model.onnx")


def content(model: onnx.ModelProto) -> tuple[list[bytes], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Return nodes in any order, and tensors by their names."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return (
        sorted(node.SerializeToString(deterministic=True) for node in model.graph.node),
        {name: (str(values.dtype), values.shape, values.tobytes()) for name, values in tensors.items()},
    )


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("method", "limit"),
    [("min-max", IN_THE_GRAPH), ("min-max", BESIDE), ("entropy", IN_THE_GRAPH), ("percentile", IN_THE_GRAPH)],
)
def test_static_quantisation_equals_onnx_runtime_s_own(
    method: str,
    limit: int,
    symmetric: bool,
    per_channel: bool,
    graph: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", limit)
    random = np.random.default_rng(1)
    feeds = [{"x": random.normal(size=(2, tokens, 24)).astype(np.float32) + 0.5} for tokens in (3, 7, 5)]
    quantize_static(
        graph.path,
        tmp_path / "theirs.onnx",
        Calls(feeds),
        op_types_to_quantize=["MatMul"],
        nodes_to_quantize=list(PRODUCTS),
        per_channel=per_channel,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod[METHODS[method]],
        extra_options={
            "ActivationSymmetric": symmetric,
            "OpTypesToExcludeOutputQuantization": ["MatMul"],
            "CalibStridedMinMax": 1,
        },
    )
    calibration = Calibration(method=method, symmetric=symmetric, per_channel=per_channel, smooth=0.0)
    real = save_graph(load_whole(graph.path), tmp_path / "source" / "model.onnx")
    ours = quantise_statically(real, tmp_path / "int8" / "model.onnx", calibration, feeds, ["apart"])
    assert (ours.matmuls, ours.left_alone) == (len(PRODUCTS), ("apart",))
    assert len(real.files) == (1 if limit == IN_THE_GRAPH else 2)
    nodes, tensors = content(load_whole(ours.graph.path))
    their_nodes, their_tensors = content(onnx.load(str(tmp_path / "theirs.onnx")))
    assert tensors == their_tensors
    assert nodes == their_nodes
    onnx.checker.check_model(str(ours.graph.path))


def test_static_quantisation_of_no_product_is_an_error(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="0 of 0 matrix products were quantised"):
        quantise_statically(graph, tmp_path / "int8" / "model.onnx", Calibration(), [], [*PRODUCTS, "apart"])


def test_calibration_that_quantised_nothing_is_an_error(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.engines.optimise.static_quantisation._Steps.put_before", lambda steps, products: None)
    feeds = [{"x": np.ones((2, 3, 24), np.float32)}]
    missed = f"0 of {len(PRODUCTS) + 1} matrix products were quantised"
    with pytest.raises(VerificationError, match=missed):
        quantise_statically(graph, tmp_path / "int8" / "model.onnx", Calibration(), feeds)

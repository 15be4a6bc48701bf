from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from builder.graphs.onnx.cleanup import clean


def _model(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], shapes: dict[str, list]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
        value_info=[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def test_clean_removes_only_reshapes_that_undo_each_other() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "split"], ["a"]),
        helper.make_node("Reshape", ["a", "merge"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Reshape", ["c", "split"], ["y"]),
    ]
    weights = {"split": np.array([-1, 2, 3]), "merge": np.array([-1, 6])}
    shapes = {"a": ["batch", 2, 3], "b": ["batch", 6], "c": ["batch", 6]}
    model = _model(nodes, weights, shapes)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = _run(model, x)
    clean(model)
    assert [node.op_type for node in model.graph.node] == ["Relu", "Reshape"]
    np.testing.assert_array_equal(_run(model, x), expected)


def test_clean_keeps_reshapes_of_unknown_shape() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    model = _model(nodes, {"flat": np.array([-1])}, {})
    clean(model)
    assert [node.op_type for node in model.graph.node] == ["Reshape", "Relu"]


def test_clean_gives_a_normalisation_without_bias_zeros() -> None:
    nodes = [helper.make_node("LayerNormalization", ["x", "scale"], ["y"])]
    model = _model(nodes, {"scale": np.linspace(1, 2, 6, dtype=np.float32)}, {})
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = _run(model, x)
    clean(model)
    assert len(model.graph.node[0].input) == 3
    np.testing.assert_array_equal(_run(model, x), expected)


def test_clean_removes_unused_weights_and_nodes() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["nobody"])]
    model = _model(nodes, {"unused": np.zeros(3, np.float32)}, {})
    clean(model)
    assert [node.op_type for node in model.graph.node] == ["Relu"]
    assert not model.graph.initializer


def test_clean_keeps_the_batch_axis_of_a_squeeze() -> None:
    """Regression: mBART's token shift squeezes an axis of 1; ONNX's Squeeze also removed the batch of a single text."""
    nodes = [
        helper.make_node("ReduceMax", ["x", "last"], ["a"]),
        helper.make_node("Squeeze", ["a"], ["y"]),
    ]
    model = _model(nodes, {"last": np.array([-1])}, {"a": ["batch", 1]})
    clean(model)
    assert [_run(model, np.zeros((rows, 6), np.float32)).shape for rows in (1, 3)] == [(1,), (3,)]

"""The most probable tokens that a decoder's graph finds for searches in its logits."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from builder.graphs.onnx.likeliest import OUTPUTS, add_likeliest
from builder.runtime.generation.executors.base import TOP_COUNT, TOP_TOKENS

VOCABULARY = 40


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """Return a session of a graph that returns the logits it is given."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, VOCABULARY]) for name in ("x", "logits")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["logits"])], "given", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    add_likeliest(model)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("count", [1, 5, VOCABULARY + 3])
def test_likeliest_breaks_rounding_ties_by_logits(session: onnxruntime.InferenceSession, count: int) -> None:
    """Greedy rows beside a search choose the highest logit, and among equal ones the lower token id."""
    logits = np.random.default_rng(0).uniform(1e-9, 2e-9, (3, VOCABULARY)).astype(np.float32)
    logits[:, 30:] = logits[:, :10]
    (found,) = session.run([TOP_TOKENS], {"x": logits, TOP_COUNT: np.array([count])})
    np.testing.assert_array_equal(found, np.argsort(-logits, axis=-1, kind="stable")[:, :count])


@pytest.mark.parametrize("shift", [-1000, 0, 1000])
def test_likeliest_totals_normalise_the_logits(session: onnxruntime.InferenceSession, shift: float) -> None:
    logits = np.random.default_rng(1).normal(size=(4, VOCABULARY)).astype(np.float32) + np.float32(shift)
    found, _, totals = session.run([*OUTPUTS], {"x": logits, TOP_COUNT: np.array([VOCABULARY])})
    np.testing.assert_allclose(np.exp(found - totals).sum(axis=-1), 1, rtol=1e-3)


def test_likeliest_computes_nothing_for_a_count_of_zero(session: onnxruntime.InferenceSession) -> None:
    found = session.run([*OUTPUTS], {"x": np.zeros((2, VOCABULARY), np.float32), TOP_COUNT: np.zeros(1, np.int64)})
    assert [len(values) for values in found] == [0, 0, 0]

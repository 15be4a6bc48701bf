"""Weights whose products overflow on x86 without VNNI are found, in every form that products of bytes have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from builder.engines.onnxruntime.saturation import overflows

TRANSPOSED = [
    helper.make_node("DequantizeLinear", ["bytes", "scale"], ["x"]),
    helper.make_node("DequantizeLinear", ["weight", "scale"], ["real"]),
    helper.make_node("Transpose", ["real"], ["turned"]),
    helper.make_node("MatMul", ["x", "turned"], ["y"]),
]
FORMS = {
    "integers": [helper.make_node("MatMulInteger", ["bytes", "weight"], ["y"])],
    "dynamic": [helper.make_node("DynamicQuantizeMatMul", ["x", "weight", "scale"], ["y"], domain="com.microsoft")],
    "linear": [
        helper.make_node("QLinearMatMul", ["bytes", "scale", "zero", "weight", "scale", "zero", "scale", "zero"], ["y"])
    ],
    "transposed": TRANSPOSED,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("largest", "expected"), [(64, False), (65, True), (-128, True)])
def test_products_of_bytes_beyond_seven_bits_overflow(form: str, largest: int, expected: bool, tmp_path: Path) -> None:
    """Regression: those that a graph of one's own may have were not seen."""
    weight = numpy_helper.from_array(np.array([[1, largest], [2, 3]], np.int8), "weight")
    graph = helper.make_graph(FORMS[form], "products", [], [], [weight])
    onnx.save(helper.make_model(graph), str(tmp_path / "model.onnx"))
    assert overflows(tmp_path / "model.onnx") is expected


def test_products_of_reals_do_not_overflow(tmp_path: Path) -> None:
    """A weight that is dequantised before a product with real activations is multiplied as a real one."""
    nodes = [*TRANSPOSED[1:3], helper.make_node("MatMul", ["x", "turned"], ["y"])]
    weight = numpy_helper.from_array(np.full((2, 2), 127, np.int8), "weight")
    onnx.save(helper.make_model(helper.make_graph(nodes, "products", [], [], [weight])), str(tmp_path / "model.onnx"))
    assert not overflows(tmp_path / "model.onnx")

"""Weights whose products overflow on x86 without VNNI are found, in every form that products of bytes have.

Products in blocks overflow nowhere. With QEMU 7.2 (`qemu-x86_64-static -cpu Haswell`), whose processor has AVX2 and no
VNNI, ONNX Runtime 1.31.1 passes the tests of those, and gives half of a MatMulInteger of 255 by 127.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.checkpoints.grids import pack
from builder.engines.onnxruntime.saturation import overflows
from builder.graphs.onnx.operators import DOMAIN

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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("end", ["lowest", "highest", "both"])
def test_products_in_blocks_add_the_largest_products_exactly(bits: int, block: int, end: str) -> None:
    """Sums of codes and activations at the ends of their ranges fit, on this processor, whichever it is."""
    top, (rows, inputs, outputs) = 2**bits - 1, (5, 256, 24)
    column = {"lowest": np.zeros(inputs), "highest": np.full(inputs, top), "both": np.arange(inputs) // 2 % 2 * top}[
        end
    ]
    codes = np.tile(column, (outputs, 1)).astype(np.uint8)
    signs = [np.ones(inputs), -np.ones(inputs), np.where(np.arange(inputs) // 2 % 2, 1, -1)]
    for zero in (0, 2 ** (bits - 1), top):
        zeros = pack(np.full((outputs, inputs // block), zero, np.uint8), bits)
        constants = {
            "codes": pack(codes, bits).reshape(outputs, inputs // block, -1),
            "scales": np.ones((outputs, inputs // block), np.float32),
            "zeros": zeros,
        }
        attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": 4}
        node = helper.make_node("MatMulNBits", ["x", *constants], ["y"], domain=DOMAIN, **attributes)
        session = session_of(node, constants, ["x"])
        for sign in signs:
            x = np.tile(sign, (rows, 1)).astype(np.float32)
            expected = x @ (codes.astype(np.float32) - zero).T
            for some in (x[:1], x):
                (actual,) = session.run(None, {"x": some})
                np.testing.assert_allclose(actual, expected[: len(some)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("highest", [False, True])
def test_experts_in_blocks_add_the_largest_products_exactly(bits: int, block: int, highest: bool) -> None:
    experts, size, scale = 2, 128, np.float32(1 / 64)
    code = (2**bits - 1) * highest
    codes = pack(np.full((experts, size, size), code, np.uint8), bits)
    scales = np.full((experts, size, size // block), scale)
    constants = {"into": codes, "into_scales": scales, "out": codes, "out_scales": scales}
    inputs = ["x", "logits", "into", "into_scales", "", "out", "out_scales"]
    attributes = {"k": 1, "activation_type": "identity", "expert_weight_bits": bits, "block_size": block}
    node = helper.make_node("QMoE", inputs, ["y"], domain=DOMAIN, accuracy_level=4, **attributes)
    session = session_of(node, constants, ["x", "logits"])
    weights = np.full((size, size), (code - 2 ** (bits - 1)) * scale)
    for rows in (1, 5):
        for sign in (1, -1):
            x = np.full((rows, size), sign, np.float32)
            logits = np.tile(np.array([50, 0], np.float32), (rows, 1))
            (actual,) = session.run(None, {"x": x, "logits": logits})
            np.testing.assert_allclose(actual, x @ weights.T @ weights.T, rtol=1e-6)


def session_of(
    node: onnx.NodeProto, constants: dict[str, np.ndarray], inputs: list[str]
) -> onnxruntime.InferenceSession:
    """Open a graph of `node` alone, with real `inputs` of two axes."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in (*inputs, "y")]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "products", values[:-1], values[-1:], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

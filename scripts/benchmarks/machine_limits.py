"""The machine's limits, as plain measurements: multiplications a second by precision, and bytes read a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from builder.common.machine import available_cores

SIZES = (1024, 768, 3072)  # rows, inputs and outputs of a matrix product, as in BERT-base
BANDWIDTH_BYTES = 1 << 28
TURNS = 15


def machine_limits() -> dict[str, float]:
    """Return 10^9 operations a second by precision (a product of matrices on all cores), and 10^9 bytes a second."""
    rows, inputs, outputs = SIZES
    operations = 2 * rows * inputs * outputs / 1e9
    rates = {precision: operations / _seconds(_product(precision)) for precision in ("fp32", "int8")}
    rates["bf16"] = operations / _seconds(_product_in_bf16())
    return {**rates, "bandwidth": read_bandwidth()}


def read_bandwidth() -> float:
    """Return 10^9 bytes a second that all cores read from memory."""
    return BANDWIDTH_BYTES / 1e9 / _seconds(_read())


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _product(precision: str) -> Callable[[], object]:
    """Return one MatMul, or MatMulInteger of unsigned and signed 8-bit values, of ONNX Runtime."""
    rows, inputs, outputs = SIZES
    generator = np.random.default_rng(0)
    x, weights = (generator.integers(0, 64, shape, np.uint8) for shape in ((rows, inputs), (inputs, outputs)))
    operator, kinds = "MatMulInteger", (TensorProto.UINT8, TensorProto.INT32)
    feeds: dict[str, np.ndarray] = {"x": x}
    constant = numpy_helper.from_array(weights.astype(np.int8), "weights")
    if precision == "fp32":
        operator, kinds = "MatMul", (TensorProto.FLOAT, TensorProto.FLOAT)
        feeds, constant = {"x": x.astype(np.float32)}, numpy_helper.from_array(weights.astype(np.float32), "weights")
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "weights"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", kinds[0], [rows, inputs])],
        [helper.make_tensor_value_info("y", kinds[1], [rows, outputs])],
        [constant],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = available_cores()
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def _product_in_bf16() -> Callable[[], object]:
    """Return a product of PyTorch, because ONNX Runtime has none in bf16 on a CPU."""
    import torch

    torch.set_num_threads(available_cores())
    rows, inputs, outputs = SIZES
    x, weights = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((rows, inputs), (outputs, inputs)))
    return lambda: torch.nn.functional.linear(x, weights)


def _read() -> Callable[[], object]:
    """Return a sum of more bytes than any cache has, by all cores as torch divides it."""
    import torch

    torch.set_num_threads(available_cores())
    values = torch.ones(BANDWIDTH_BYTES // 4)
    return lambda: values.sum()

"""Find products of bytes that overflow on an x86 CPU without VNNI.

There ONNX Runtime multiplies unsigned activations by signed weights with vpmaddubsw, which adds two products in 16
bits: 2 * 255 * 64 is the most that fits. MatMulNBits and QMoE, which use it too, do not overflow: their kernels of 8
bits split the weights first, and products of 4 bits fit (mlas/lib/sqnbitgemm_kernel_avx2_int8_blklen64.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from builder.common.machine import SEVEN_BITS
from builder.graphs.onnx.graph import load_graph, nodes_of
from builder.graphs.onnx.weights import values_of

# Products of bytes, and the place of the weight among their inputs.
INTEGER_PRODUCTS = {
    "MatMulInteger": 1,
    "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1,
    "QAttention": 1,
    "QLinearMatMul": 3,
    "QGemm": 3,
}
REAL_PRODUCTS = ("MatMul", "Gemm")  # which become integer ones, if both factors were bytes
REAL, PASSED = "DequantizeLinear", "Transpose"


def overflows(path: Path) -> bool:
    """Return True if a product in `path` has a weight in bytes beyond 64."""
    graph = load_graph(path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT8}
    return any(
        np.abs(values_of(weights[name]).astype(np.int16)).max(initial=0) > SEVEN_BITS
        for name in set(_factors(graph)) & set(weights)
    )


def _factors(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the weights of products of bytes, as they are stored."""
    makers = {output: node for node in nodes_of(graph) for output in node.output}
    for node in nodes_of(graph):
        if node.op_type in INTEGER_PRODUCTS:
            yield _stored(node.input[INTEGER_PRODUCTS[node.op_type]], makers, (REAL, PASSED))
        elif node.op_type in REAL_PRODUCTS:
            sources = [makers.get(_stored(name, makers, (PASSED,))) for name in node.input[:2]]
            if all(source is not None and source.op_type == REAL for source in sources):
                yield _stored(node.input[1], makers, (REAL, PASSED))


def _stored(name: str, makers: Mapping[str, onnx.NodeProto], through: Sequence[str]) -> str:
    """Return the tensor that `name` is made from by nodes of the types `through`."""
    while name in makers and makers[name].op_type in through:
        name = makers[name].input[0]
    return name

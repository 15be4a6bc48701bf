"""Find products of bytes that overflow on an x86 CPU without VNNI.

There ONNX Runtime multiplies unsigned activations by signed weights with vpmaddubsw, which adds two products in 16
bits: 2 * 255 * 64 is the most that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from builder.common.machine import SEVEN_BITS
from builder.graphs.onnx.graph import load_graph, nodes_of
from builder.graphs.onnx.weights import values_of

INTEGER_PRODUCTS = ("MatMulInteger", "MatMulIntegerToFloat")
REAL_PRODUCTS = ("MatMul", "Gemm")  # which become integer ones, if both factors were bytes
REAL = "DequantizeLinear"


def overflows(path: Path) -> bool:
    """Return True if a product in `path` has a weight in bytes beyond 64."""
    graph = load_graph(path).graph
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT8}
    return any(
        np.abs(values_of(weights[name]).astype(np.int16)).max(initial=0) > SEVEN_BITS
        for name in set(_factors(graph)) & set(weights)
    )


def _factors(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the second factors of products of bytes, as they are stored."""
    makers = {output: node for node in nodes_of(graph) for output in node.output}
    for node in nodes_of(graph):
        both = [makers[name].op_type if name in makers else "" for name in node.input[:2]]
        if node.op_type in INTEGER_PRODUCTS or (node.op_type in REAL_PRODUCTS and both == [REAL, REAL]):
            name = node.input[1]
            while name in makers and makers[name].op_type in (REAL, "Transpose"):
                name = makers[name].input[0]
            yield name

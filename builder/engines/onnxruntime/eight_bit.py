"""Products by matrices of bytes in ONNX Runtime: an 8-bit dot product, whose activations are rounded token by token.

One scale per token, not one per call as DynamicQuantizeLinear has, makes a row's answer independent of the rows beside
it: the answer to a request does not depend on the other requests of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import onnx
from onnx import helper

from builder.common.machine import largest_byte_weight
from builder.engines.eight_bit import EightBitProducts
from builder.graphs.onnx.nodes import add_constant
from builder.graphs.onnx.operators import DOMAIN


class OnnxRuntimeEightBit(EightBitProducts):
    """Products of the form x's scale * (int8(x) . int8(W)) * W's scales."""

    operator: ClassVar[str] = "MatMulIntegerToFloat"

    def __init__(self, graph: onnx.GraphProto) -> None:
        super().__init__(graph)
        self.steps = largest_byte_weight()
        self.rounded: set[str] = set()
        add_constant(graph, "quantise.zero", np.array(128, np.uint8))
        add_constant(graph, "quantise.step", np.array(1 / 127, np.float32))
        add_constant(graph, "quantise.axis", np.array([-1], np.int64))

    def by_columns(self, node: onnx.NodeProto, matrix: np.ndarray) -> Iterator[onnx.NodeProto]:
        source, name = node.input
        self._store(name, matrix, axis=0)
        yield from self._product(source, node.output[0], f"{name}.int8", name)

    def by_rows(self, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
        source, name = node.input
        self._store(name, table, axis=1)
        columns = f"{node.output[0]}.columns"
        yield helper.make_node("Transpose", [f"{name}.int8"], [columns], perm=[1, 0])
        yield from self._product(source, node.output[0], columns, name)

    def _store(self, name: str, values: np.ndarray, axis: int) -> None:
        if self.store(name, values, axis):
            add_constant(self.graph, f"{name}.zero", np.zeros(values.shape[1 - axis], np.int8))

    def _product(self, source: str, output: str, matrix: str, name: str) -> Iterator[onnx.NodeProto]:
        if source not in self.rounded:
            self.rounded.add(source)
            yield from _round(source)
        inputs = [f"{source}.int8", matrix, "quantise.step", f"{name}.scale.flat", "quantise.zero", f"{name}.zero"]
        yield helper.make_node(self.operator, inputs, [f"{output}.shares"], domain=DOMAIN)
        yield helper.make_node("Mul", [f"{output}.shares", f"{source}.most"], [output])


def _round(source: str) -> Iterator[onnx.NodeProto]:
    """Round activations to 8 bits around 128, with one scale per token: the largest of its row over 127."""
    yield helper.make_node("Abs", [source], [f"{source}.abs"])
    yield helper.make_node("ReduceMax", [f"{source}.abs", "quantise.axis"], [f"{source}.most"], keepdims=1)
    yield helper.make_node("Div", [source, f"{source}.most"], [f"{source}.shares"])
    yield helper.make_node("QuantizeLinear", [f"{source}.shares", "quantise.step", "quantise.zero"], [f"{source}.int8"])


EIGHT_BIT = OnnxRuntimeEightBit

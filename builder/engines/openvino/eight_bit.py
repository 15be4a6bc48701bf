"""Products by matrices of bytes in OpenVINO: DequantizeLinear before the product, which its CPU plugin keeps small.

It rounds activations to 8 bits in groups of `openvino.ACTIVATIONS`, each token's by itself, so that a row's answer does
not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import onnx
from onnx import helper

from builder.engines.eight_bit import EightBitProducts


class OpenVinoEightBit(EightBitProducts):
    """Products of the form MatMul(x, int8(W) * W's scales)."""

    operator: ClassVar[str] = "DequantizeLinear"

    def by_columns(self, node: onnx.NodeProto, matrix: np.ndarray) -> Iterator[onnx.NodeProto]:
        source, name = node.input
        real = f"{node.output[0]}.matrix"
        yield self._dequantised(name, matrix, 0, real)
        yield helper.make_node("MatMul", [source, real], list(node.output), name=node.name)

    def by_rows(self, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
        source, name = node.input
        rows = f"{node.output[0]}.rows"
        yield self._dequantised(name, table, 1, rows)
        yield helper.make_node("Transpose", [rows], [f"{rows}.turned"], perm=[1, 0])
        yield helper.make_node("MatMul", [source, f"{rows}.turned"], list(node.output), name=node.name)

    def _dequantised(self, name: str, values: np.ndarray, axis: int, output: str) -> onnx.NodeProto:
        """Return `values` rounded along `axis`: one scale for each place of the other one."""
        self.store(name, values, axis)
        return helper.make_node(self.operator, [f"{name}.int8", f"{name}.scale.flat"], [output], axis=1 - axis)


EIGHT_BIT = OpenVinoEightBit

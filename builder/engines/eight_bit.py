"""How an engine multiplies by a matrix of bytes: what replaces a product of real numbers in its graphs.

An engine that has such products has a class `EightBit` in `weights.py` of its room. Knows nodes; knows nothing about
quality.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import onnx

from builder.onnx.nodes import add_constant, eight_bit_scales, store_eight_bit


class EightBitProducts(ABC):
    """The products of one graph, whose constants it gains. Matrices are stored once, whoever reads them."""

    operator: ClassVar[str]  # of which each product has one

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.stored: set[str] = set()

    @abstractmethod
    def by_columns(self, node: onnx.NodeProto, matrix: np.ndarray) -> Iterator[onnx.NodeProto]:
        """Nodes for `node`, MatMul(x, matrix), with a scale a column of `matrix`, (inputs, outputs)."""

    @abstractmethod
    def by_rows(self, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
        """Nodes for `node`, Gemm(x, table, transB=1), with a scale a row of `table`, (outputs, inputs)."""

    def store(self, name: str, values: np.ndarray, axis: int) -> bool:
        """Keep `values` as `name`.int8, rounded along `axis`, with `name`.scale.flat; False where that was done."""
        if name in self.stored:
            return False
        self.stored.add(name)
        store_eight_bit(self.graph, name, values, axis)
        add_constant(self.graph, f"{name}.scale.flat", eight_bit_scales(values, axis).ravel())
        return True


def eight_bit_products(engine: str, graph: onnx.GraphProto) -> EightBitProducts:
    """Those of `engine`, for `graph`."""
    products: EightBitProducts = importlib.import_module(f"builder.engines.{engine}.weights").EightBit(graph)
    return products

"""Interface of an engine's products by matrices of few bits, which replace products of real numbers in its graphs.

Knows nodes; knows nothing about quality.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import onnx
from onnx import helper

from builder.checkpoints.grids import LARGEST_BLOCK, QuantizedBlocks
from builder.graphs.onnx.nodes import add_constant, eight_bit_lookup, eight_bit_scales, store_eight_bit
from builder.graphs.onnx.operators import DOMAIN


class EightBitProducts(ABC):
    """Products of one graph, which gains their constants. A matrix with several readers is stored once."""

    operator: ClassVar[str]  # each product by a matrix of bytes has one
    accuracy: ClassVar[int] = 4  # of MatMulNBits: it rounds activations to 8 bits
    largest_block: ClassVar[int] = LARGEST_BLOCK  # of MatMulNBits
    steps: int = 127  # the largest absolute value of a weight in bytes

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.stored: set[str] = set()

    @abstractmethod
    def by_columns(self, node: onnx.NodeProto, matrix: np.ndarray) -> Iterator[onnx.NodeProto]:
        """Return nodes for `node`, MatMul(x, matrix), with a scale per column of `matrix`, (inputs, outputs)."""

    @abstractmethod
    def by_rows(self, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
        """Return nodes for `node`, Gemm(x, table, transB=1), with a scale per row of `table`, (outputs, inputs)."""

    def lookup(self, node: onnx.NodeProto, table: np.ndarray) -> Iterable[onnx.NodeProto]:
        """Return nodes for `node`, Gather(table, rows), with a scale per row."""
        return eight_bit_lookup(self.graph, node, table, self.steps)

    def in_blocks(self, node: onnx.NodeProto, blocks: QuantizedBlocks) -> onnx.NodeProto:
        """Return MatMulNBits for `node`, a product by the matrix that is `blocks`."""
        return helper.make_node(
            "MatMulNBits",
            [node.input[0], *self.store_blocks(node.input[1], blocks)],
            list(node.output),
            node.name,
            domain=DOMAIN,
            K=blocks.inputs,
            N=len(blocks.codes),
            bits=blocks.bits,
            block_size=blocks.size,
            accuracy_level=self.accuracy,
        )

    def store_blocks(self, name: str, blocks: QuantizedBlocks) -> list[str]:
        """Store `blocks` once as constants: codes, scales and, where they are not in the middle, zeros."""
        parts = {"codes": blocks.codes, "scales": blocks.scales, "zeros": blocks.zeros}
        if blocks.is_symmetric:
            del parts["zeros"]
        if name not in self.stored:
            self.stored.add(name)
            for part, values in parts.items():
                add_constant(self.graph, f"{name}.{part}", values)
        return [f"{name}.{part}" for part in parts]

    def store(self, name: str, values: np.ndarray, axis: int) -> bool:
        """Store `values` as `name`.int8, rounded along `axis`, with `name`.scale.flat; False if already stored."""
        if name in self.stored:
            return False
        self.stored.add(name)
        store_eight_bit(self.graph, name, values, axis, self.steps)
        add_constant(self.graph, f"{name}.scale.flat", eight_bit_scales(values, axis, self.steps).ravel())
        return True

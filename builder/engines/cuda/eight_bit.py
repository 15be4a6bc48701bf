"""Products by matrices of few bits on a GPU: MatMulNBits, whose CUDA kernel takes activations as they are.

Its scales are of the type of the activations, its zero points bytes, its blocks of 16 to 128 inputs: of 256 a product
of one row by 4 bits is an error. 8 bits are there from ONNX Runtime 1.22 on (pull request 24509). It does not read
`accuracy_level`. One row, in newer versions up to 16, is multiplied by the packed matrix, where inputs and outputs are
multiples of 8; for any other product the matrix is first unpacked to half precision, unless a session's entry allows
the kernels of TensorRT-LLM (fpA_intB), which multiply by it as it is. Those of the published package take fp16 (not
bf16), blocks of 32 without zero points, outputs in multiples of 64 (of 32 in 8 bits), from compute capability 7.5 on
(matmul_nbits.cc, CheckFpAIntBEligibility with USE_COMPACT_FPA_INTB_GEMM; its messages, and the entry, are in
onnxruntime-gpu 1.31.1). A session that allows them times their variants for each shape of matrix as it starts.
Source: ONNX Runtime, onnxruntime/contrib_ops/cuda/quantization: matmul_nbits.cc, matmul_4bits.cu, matmul_8bits.cu; not
run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.checkpoints.grids import QuantizedBlocks
from builder.common.errors import SpecError
from builder.common.releases import runtime_of, version_tuple
from builder.engines.eight_bit import EightBitProducts
from builder.graphs.onnx.nodes import add_constant, eight_bit_scales, eight_bits

SIZES = (32, 16)  # of a block: that of the kernels for many rows, or the smallest
LARGEST_BLOCK = 128
ENTRY, ENTRY_SINCE = "ep.cuda.fpa_intb_gemm", "1.31.1"
MIDDLE = 128  # zero point of codes in 8 bits


def product_entries(triton: str) -> dict[str, str]:
    """Return the session's entry for products of many rows, where the package of the release's Python has it."""
    has = version_tuple(runtime_of(triton, in_process=True)) >= version_tuple(ENTRY_SINCE)
    return {ENTRY: "1"} if has else {}


class CudaEightBit(EightBitProducts):
    """Products by matrices of few bits on CUDA.

    A lookup table is stored in the layout of a product, so one that is also the output matrix is stored once.
    """

    operator: ClassVar[str] = "MatMulNBits"
    accuracy: ClassVar[int] = 0  # left unset
    largest_block: ClassVar[int] = LARGEST_BLOCK

    def by_columns(self, node: onnx.NodeProto, matrix: np.ndarray) -> Iterator[onnx.NodeProto]:
        yield self.in_blocks(node, rounded_to_bytes(matrix.T))

    def by_rows(self, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
        yield self.in_blocks(node, rounded_to_bytes(table))

    def lookup(self, node: onnx.NodeProto, table: np.ndarray) -> Iterator[onnx.NodeProto]:
        """Yield nodes for (codes - 128) * scales of the rows, (batch, new, blocks, size), as (batch, new, inputs)."""
        (name, rows), output = node.input, node.output[0]
        codes, scales = self.store_blocks(name, rounded_to_bytes(table))
        middle, last, shape = (f"{output}.{part}" for part in ("middle", "last", "shape"))
        add_constant(self.graph, middle, np.array(MIDDLE, np.float32))
        add_constant(self.graph, last, np.array([-1], np.int64))
        add_constant(self.graph, shape, np.array([0, 0, -1], np.int64))
        yield helper.make_node("Gather", [codes, rows], [f"{output}.codes"])
        yield helper.make_node("Cast", [f"{output}.codes"], [f"{output}.cast"], to=TensorProto.FLOAT)
        yield helper.make_node("Sub", [f"{output}.cast", middle], [f"{output}.steps"])
        yield helper.make_node("Gather", [scales, rows], [f"{output}.scales"])
        yield helper.make_node("Unsqueeze", [f"{output}.scales", last], [f"{output}.sizes"])
        yield helper.make_node("Mul", [f"{output}.steps", f"{output}.sizes"], [f"{output}.blocks"])
        yield helper.make_node("Reshape", [f"{output}.blocks", shape], [output])


def rounded_to_bytes(rows: np.ndarray) -> QuantizedBlocks:
    """Return `rows`, (outputs, inputs), in 8 bits around 128, a scale per block.

    Raises SpecError if no block fits.
    """
    outputs, inputs = rows.shape
    size = next((size for size in SIZES if inputs % size == 0), None)
    if size is None:
        raise SpecError(
            f"a matrix of {inputs} inputs is not made of blocks of {SIZES[-1]}, which smaller weights on a GPU need; "
            "use --precision fp16"
        )
    blocks = rows.reshape(outputs, -1, size)
    scales = eight_bit_scales(blocks, axis=2)
    codes = eight_bits(blocks, scales).view(np.uint8) ^ np.uint8(MIDDLE)  # of two's complement: 128 more
    return QuantizedBlocks(8, size, inputs, codes, scales[..., 0], np.full(scales.shape[:2], MIDDLE, np.uint8))


EIGHT_BIT = CudaEightBit

"""Smaller weights for mixtures of experts: QMoE, which multiplies by blocks of 4 or 8 bits of the chosen experts.

Operator: com.microsoft QMoE, as in ONNX Runtime's ContribOperators.md and contrib_ops/cpu/moe/moe_quantization_cpu.cc.
It takes what MoE takes, its weights in codes with a scale for each block of inputs, as MatMulNBits has them, and rounds
activations to 8 bits. Its floating-point codes (fp4, fp8) have no kernel on the CPU in 1.31.1. Knows nodes; knows
nothing about quality.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.checkpoints.grids import LARGEST_BLOCK, SMALLEST_BLOCK, QuantizedBlocks, StoredWeights, pack
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.experts import INTO, INTO_BIAS, OUT_OF, OUT_OF_BIAS
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import replace_nodes
from builder.graphs.onnx.operators import DOMAIN, EXPERTS, QUANTISED_EXPERTS
from builder.graphs.onnx.weights import computed, computing, rows_of
from builder.options import WeightOptions

EIGHT_BIT_ACTIVATIONS = 4  # accuracy_level


class QuantisedExperts(NamedTuple):
    """QMoE of one mixture, and whether its codes are the checkpoint's own."""

    node: onnx.NodeProto
    as_stored: bool


def block_of(graph: onnx.GraphProto, largest: int) -> int | None:
    """Return the block of at most `largest` inputs that divides those of all experts in `graph`; None without one."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == EXPERTS]
    inputs = {tensors[node.input[place]].dims[2] for node in nodes for place in (INTO, OUT_OF)}
    size = largest
    while size >= SMALLEST_BLOCK:
        if all(count % size == 0 for count in inputs):
            return size
        size //= 2
    return None


def quantise_experts(graph: Graph, options: WeightOptions, folder: Path) -> Graph | None:
    """Write `graph` into `folder` with its experts in blocks of 8 bits; None if no block divides their inputs.

    `options.block_size`: the largest block.
    """
    model = load_graph(graph.path)
    block = block_of(model.graph, options.block_size)
    if block is None:
        return None
    options = replace(options, block_size=block)
    with computing():
        nodes = [
            quantised_experts(model.graph, node, 8, options).node if node.op_type == EXPERTS else node
            for node in model.graph.node
        ]
        replace_nodes(model.graph, nodes)
        drop_unused(model.graph)
        return save_graph(model, folder / "eight-bit-experts" / graph.path.name)


def quantised_experts(
    graph: onnx.GraphProto, node: onnx.NodeProto, bits: int, options: WeightOptions, stored: StoredWeights | None = None
) -> QuantisedExperts:
    """Return QMoE for the MoE `node`, and add its constants to `graph`: within `computing`.

    The block of `options` divides its inputs. Experts that are `stored` in a checkpoint keep their codes; those that
    it has in real numbers, or whose codes QMoE cannot have, are rounded to 8 bits.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    matrices = [tensors[node.input[place]] for place in (INTO, OUT_OF)]
    own = _stored_codes(graph, matrices, stored) if stored is not None else None
    codes = own or _Rounded(bits if stored is None else 8, options.block_size, options.symmetric)
    inputs, zeros = [*node.input[:INTO]], []
    for matrix, bias in zip(matrices, (INTO_BIAS, OUT_OF_BIAS), strict=True):
        count = matrix.dims[2]
        blocks = count // codes.block

        def add(part: str, kind: int, size: int, matrix: TensorProto = matrix) -> str:
            name, dims = f"{matrix.name}.{part}", (*matrix.dims[:2], size)
            graph.initializer.append(computed(name, kind, dims, codes.reader(matrix, part)))
            return name

        inputs += [add("codes", TensorProto.UINT8, count * codes.bits // 8), add("scales", TensorProto.FLOAT, blocks)]
        inputs.append(node.input[bias] if len(node.input) > bias else "")
        if not codes.symmetric:
            zeros.append(add("zeros", TensorProto.UINT8, -(-blocks * codes.bits // 8)))
    if zeros:
        inputs += ["", "", "", *zeros]  # a third matrix comes first
    result = helper.make_node(
        QUANTISED_EXPERTS,
        inputs,
        list(node.output),
        node.name,
        domain=DOMAIN,
        expert_weight_bits=codes.bits,
        block_size=codes.block,
        accuracy_level=EIGHT_BIT_ACTIVATIONS,
    )
    result.attribute.extend(node.attribute)
    return QuantisedExperts(result, own is not None)


@dataclass(frozen=True)
class _Codes(ABC):
    """Quantised weights of experts, with one scale per block of inputs. `symmetric`: without zero points."""

    bits: int
    block: int
    symmetric: bool

    @abstractmethod
    def blocks(self, values: np.ndarray) -> QuantizedBlocks:
        """Return one expert's weights, (outputs, inputs), in blocks."""

    def reader(self, matrix: TensorProto, part: str) -> Callable[[slice], np.ndarray]:
        """Return a reader of one `part` of some experts at a time, (experts, outputs, ...), which saves memory."""
        rows = rows_of(matrix)

        def read(experts: slice) -> np.ndarray:
            parts = [getattr(self.blocks(np.asarray(values)), part) for values in rows(experts)]
            return np.stack([values.reshape(len(values), -1) for values in parts])

        return read


class _Rounded(_Codes):
    """Codes nearest to the weights."""

    def blocks(self, values: np.ndarray) -> QuantizedBlocks:
        outputs, inputs = values.shape
        values = values.reshape(outputs, -1, self.block)
        low, high = np.minimum(values.min(axis=-1), 0), np.maximum(values.max(axis=-1), 0)
        step_count = 2**self.bits - 1
        if self.symmetric:  # the larger end gets the code 0, of which there is one more than on the other side
            middle = np.float32(2 ** (self.bits - 1))
            scale = np.where(-low >= high, -low, -high) / middle
        else:
            scale = (high - low) / np.float32(step_count)
        scale = np.where(scale == 0, np.float32(1), scale)
        zero = np.full_like(scale, middle) if self.symmetric else np.round(-low / scale)
        code = np.clip(np.round(values / scale[..., None]) + zero[..., None], 0, step_count).astype(np.uint8)
        zeros = pack(zero.astype(np.uint8), self.bits)
        return QuantizedBlocks(self.bits, self.block, inputs, pack(code, self.bits), scale, zeros)


@dataclass(frozen=True)
class _Stored(_Codes):
    """Codes that the checkpoint stores for all of these weights."""

    weights: StoredWeights

    def blocks(self, values: np.ndarray) -> QuantizedBlocks:
        found = self.weights.blocks(values.T, self.block)
        assert found is not None
        return found


def _stored_codes(graph: onnx.GraphProto, matrices: Sequence[TensorProto], stored: StoredWeights) -> _Stored | None:
    """Return the codes of all experts of `matrices`, in blocks of one size; None if an expert has no codes."""
    largest = block_of(graph, LARGEST_BLOCK)
    if largest is None:
        return None
    symmetric = True
    for matrix in matrices:
        rows = rows_of(matrix)
        for expert in range(matrix.dims[0]):
            (values,) = rows(slice(expert, expert + 1))
            blocks = stored.blocks(values.T, largest)
            if blocks is None:
                return None
            largest, symmetric = min(largest, blocks.size), symmetric and blocks.is_symmetric
    return _Stored(stored.bits, largest, symmetric, stored)

"""Weights of the quantised experts of a graph, as their codes have them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.nodes import attributes_of


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    """Return the weights of the experts in `graph` by their name, (experts, outputs, inputs) float32."""
    model = onnx.load(str(graph.path)).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.initializer}
    weights: dict[str, np.ndarray] = {}
    for node in model.node:
        if node.op_type == "MoE":
            weights |= {node.input[place]: tensors[node.input[place]] for place in (2, 4)}
        elif node.op_type == "QMoE":
            attributes = attributes_of(node)
            for place, zero in ((2, 11), (5, 12)):
                codes, scales = (tensors[node.input[place + part]] for part in (0, 1))
                bits, size = attributes["expert_weight_bits"], attributes["block_size"]
                steps = unpacked(codes, bits).reshape(*scales.shape, size).astype(np.float32)
                zeros = np.full(scales.shape, 2 ** (bits - 1), np.float32)
                if len(node.input) > zero:
                    zeros = unpacked(tensors[node.input[zero]], bits)[..., : scales.shape[-1]].astype(np.float32)
                values = (steps - zeros[..., None]) * scales[..., None]
                weights[node.input[place].removesuffix(".codes")] = values.reshape(*scales.shape[:2], -1)
    return weights


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes of `bits` bits along the last axis."""
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)

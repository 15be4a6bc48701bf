"""Make activations easier to round: move part of each channel's magnitude from the activations into the weights.

Channel j of a product's input is divided by s_j and row j of its matrix multiplied by it, with s_j = max|x_j|^strength
/ max|w_j|^(1 - strength) over real inputs. The change is exact; a single scale for all channels then rounds away far
less. Source: Xiao et al., SmoothQuant (ICML 2023), equation 4. Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.engines.optimise.activations import Feeds, watch
from builder.graphs.onnx.nodes import add_constant, constant_products, replace_nodes
from builder.graphs.onnx.weights import computed, rows_of, values_of

MIN_MAGNITUDE = 1e-5  # channels that are never used are not blown up


def smooth(model: onnx.ModelProto, strength: float, feeds: Sequence[Feeds], left_alone: Collection[str]) -> None:
    """Put one Mul before each input of products not `left_alone`, in place, and rescale their matrices."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in constant_products(model.graph):
        if node.name not in left_alone:
            readers[node.input[0]].append(node)
    largest = _largest(model, list(readers), feeds)
    inserted = {}
    for source, products in readers.items():
        matrices = [values_of(weights[node.input[1]]) for node in products]
        rows = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)
        scale = np.maximum(largest[source], MIN_MAGNITUDE) ** strength / np.maximum(rows, MIN_MAGNITUDE) ** (
            1 - strength
        )
        scale = (scale / np.exp(np.log(scale).mean())).astype(np.float32)
        add_constant(model.graph, f"{source}.smoothing", 1 / scale)
        for node in products:
            name = f"{node.output[0]}.smoothed_weight"  # its own: the matrix may be read elsewhere
            model.graph.initializer.append(_scaled(weights[node.input[1]], name, scale))
            node.input[:] = [f"{source}.smoothed", name]
        inserted[f"{source}.smoothed"] = helper.make_node(
            "Mul", [source, f"{source}.smoothing"], [f"{source}.smoothed"], name=f"{source}.smoothed"
        )
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.extend(inserted.pop(name) for name in list(node.input) if name in inserted)
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def _largest(model: onnx.ModelProto, names: list[str], feeds: Sequence[Feeds]) -> dict[str, np.ndarray]:
    """Return the largest magnitude of each channel of each tensor, (channels,)."""
    largest: dict[str, np.ndarray] = {}
    for values in watch(model, names, feeds):
        for name, value in values.items():
            peak = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            largest[name] = np.maximum(largest[name], peak) if name in largest else peak
    return largest


def _scaled(matrix: TensorProto, name: str, scale: np.ndarray) -> TensorProto:
    rows = rows_of(matrix)
    return computed(name, matrix.data_type, matrix.dims, lambda some: rows(some) * scale[some, None])

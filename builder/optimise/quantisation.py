"""Dynamic int8: weights per output channel, activations quantised as they come, embeddings as a byte table.

On CPUs with VNNI the products are 8-bit dot products (MatMulInteger, fused by ONNX Runtime at load). Which layers can
be left in fp32, and which of them to leave first, is here too: static int8 leaves the same. Knows graphs; knows
nothing about quality.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from builder.engines.onnxruntime import MODEL_FILE
from builder.errors import VerificationError
from builder.onnx.graph import EXTERNAL_FROM, Graph, load_graph, load_whole, save_graph
from builder.onnx.nodes import constant_products
from builder.optimise.activations import Feeds, watch
from builder.optimise.quantised import Quantised

EMBEDDING_BYTES = 1 << 20  # smaller tables save no memory worth an extra operator
PRODUCT, LOOKUP = "MatMul", "Gather"


def quantise(graph: Graph, path: Path, left_alone: Collection[str] = ()) -> Quantised:
    """Write `graph` in dynamic int8 to `path`, all candidates but those named in `left_alone`.

    Raises VerificationError where a product was missed.
    """
    layers = candidates(graph)
    chosen = [name for name in layers if name not in left_alone]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / MODEL_FILE
        quantize_dynamic(
            load_whole(graph.path),
            str(written),
            op_types_to_quantize=[PRODUCT, LOOKUP],
            nodes_to_quantize=chosen,
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=graph.size >= EXTERNAL_FROM,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True},
        )
        result = save_graph(onnx.load(str(written)), path)
    expected = sum(layers[name] == PRODUCT for name in chosen)
    if not expected or result.operators["MatMulInteger"] != expected:
        raise VerificationError(
            f"{result.operators['MatMulInteger']} of {expected} matrix products were quantised; nothing was published. "
            "Use --precision fp32 for this checkpoint"
        )
    return Quantised(result, expected, len(chosen) - expected, tuple(left_alone))


def candidates(graph: Graph) -> dict[str, str]:
    """Node name to operator of the products with constant weights, and of lookups in large tables."""
    model = load_graph(graph.path)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = {node.name for node in constant_products(model.graph)}
    layers = {}
    for node in model.graph.node:
        if node.name in products:
            layers[node.name] = PRODUCT
        elif node.op_type == LOOKUP and node.input[0] in weights:
            table = weights[node.input[0]]
            if table.data_type == onnx.TensorProto.FLOAT and 4 * int(np.prod(table.dims)) >= EMBEDDING_BYTES:
                layers[node.name] = LOOKUP
    return layers


def sensitivity(graph: Graph, layers: Mapping[str, str], feeds: Sequence[Feeds]) -> list[str]:
    """Candidates by the relative error that quantising each alone puts into its own output, worst first.

    Measured on `feeds`: activations are quantised per tensor to 8 bits as DynamicQuantizeLinear does, weights
    per output channel, and the product is compared with the exact one in the Frobenius norm.
    """
    model = load_whole(graph.path)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node if node.name in layers}
    errors = dict.fromkeys(layers, 0.0)
    for values in watch(model, [node.input[0] for node in nodes.values() if node.op_type == PRODUCT], feeds):
        for name, node in nodes.items():
            if node.op_type == PRODUCT:
                weight = weights[node.input[1]]
                exact = values[node.input[0]] @ weight
                rough = _rounded(values[node.input[0]], axis=None) @ _rounded(weight, axis=0)
            else:
                exact = weights[node.input[0]]
                rough = _rounded(exact, axis=None)
            errors[name] += float(np.linalg.norm(exact - rough)) / max(float(np.linalg.norm(exact)), 1e-12)
    return sorted(errors, key=errors.__getitem__, reverse=True)


def _rounded(values: np.ndarray, axis: int | None) -> np.ndarray:
    """Round to 8 bits: symmetric for each slice along `axis`, asymmetric over all values for None."""
    if axis is None:
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
        step = max((high - low) / 255, 1e-12)
        return np.clip(np.round((values - low) / step), 0, 255) * step + low
    step = np.maximum(np.abs(values).max(axis=axis, keepdims=True) / 127, 1e-12)
    return np.round(values / step) * step

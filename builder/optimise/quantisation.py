"""Dynamic int8: weights per output channel, activations quantised as they come, embeddings as a byte table.

On CPUs with VNNI the products are 8-bit dot products (MatMulInteger, fused by ONNX Runtime at load). Layers
whose quantisation costs quality are left in fp32, found by measurement. Knows graphs; `quality` is the caller's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from builder.engines.onnxruntime import MODEL_FILE
from builder.errors import VerificationError
from builder.export.graph import EXTERNAL_FROM, Graph, save_graph

Feeds = Mapping[str, np.ndarray]
EMBEDDING_BYTES = 1 << 20  # smaller tables save no memory worth an extra operator


@dataclass(frozen=True)
class Quantised:
    graph: Graph
    matmuls: int
    embeddings: int
    left_alone: tuple[str, ...]
    quality: float


def quantise(
    graph: Graph, folder: Path, quality: Callable[[Graph], float], threshold: float, feeds: Sequence[Feeds]
) -> Quantised:
    """Quantise all layers, then leave the most sensitive alone until `quality` reaches `threshold`.

    At most half of the layers are left alone. Raises VerificationError when that is not enough, or when
    nothing was quantised.
    """
    candidates = _candidates(graph)
    ranked: list[str] = []
    best = 0.0
    leave = 0
    while leave <= len(candidates) // 2:
        if leave and not ranked:
            ranked = sensitivity(graph, candidates, feeds)
        result = _quantise(graph, folder / "int8" / MODEL_FILE, candidates, ranked[:leave])
        reached = quality(result)
        best = max(best, reached)
        if reached >= threshold:
            matmuls = result.operators["MatMulInteger"]
            embeddings = sum(kind == "Gather" for name, kind in candidates.items() if name not in ranked[:leave])
            return Quantised(result, matmuls, embeddings, tuple(ranked[:leave]), reached)
        leave = max(1, leave * 2)
    raise VerificationError(
        f"int8 reaches a quality of {best:.4f} on the samples, even with {len(candidates) // 2} of {len(candidates)} "
        f"layers left in fp32; {threshold:.4f} is asked. Nothing was published: use --precision fp32, or accept less "
        "with --quality"
    )


def _quantise(graph: Graph, path: Path, candidates: Mapping[str, str], left_alone: Sequence[str]) -> Graph:
    chosen = [name for name in candidates if name not in left_alone]
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) / MODEL_FILE
        quantize_dynamic(
            str(graph.path),
            str(written),
            op_types_to_quantize=["MatMul", "Gather"],
            nodes_to_quantize=chosen,
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=graph.size >= EXTERNAL_FROM,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT, "MatMulConstBOnly": True},
        )
        result = save_graph(onnx.load(str(written)), path)
    expected = sum(candidates[name] == "MatMul" for name in chosen)
    if not expected or result.operators["MatMulInteger"] != expected:
        raise VerificationError(
            f"of {expected} matrix products {result.operators['MatMulInteger']} were quantised; nothing was published. "
            "Use --precision fp32 for this checkpoint"
        )
    return result


def _candidates(graph: Graph) -> dict[str, str]:
    """Node name to operator of the products with constant weights, and of lookups in large tables."""
    model = onnx.load(str(graph.path))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights and len(weights[node.input[1]].dims) == 2:
            found[node.name] = "MatMul"
        elif node.op_type == "Gather" and node.input[0] in weights:
            table = weights[node.input[0]]
            if table.data_type == onnx.TensorProto.FLOAT and 4 * int(np.prod(table.dims)) >= EMBEDDING_BYTES:
                found[node.name] = "Gather"
    return found


def sensitivity(graph: Graph, candidates: Mapping[str, str], feeds: Sequence[Feeds]) -> list[str]:
    """Candidates by the relative error that quantising each alone puts into its own output, worst first.

    Measured on `feeds`: activations are quantised per tensor to 8 bits as DynamicQuantizeLinear does, weights
    per output channel, and the product is compared with the exact one in the Frobenius norm.
    """
    model = onnx.load(str(graph.path))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node if node.name in candidates}
    known = {output.name for output in model.graph.output}
    captured = {node.input[0] for node in nodes.values() if node.op_type == "MatMul"} - known
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(captured))
    with tempfile.TemporaryDirectory() as place:
        watched = save_graph(model, Path(place) / MODEL_FILE)
        session = onnxruntime.InferenceSession(str(watched.path), providers=["CPUExecutionProvider"])
    errors = dict.fromkeys(candidates, 0.0)
    names = [output.name for output in session.get_outputs()]
    for feed in feeds:
        values = dict(zip(names, session.run(names, dict(feed)), strict=True))
        for name, node in nodes.items():
            if node.op_type == "MatMul":
                weight = numpy_helper.to_array(weights[node.input[1]])
                exact = values[node.input[0]] @ weight
                rough = _rounded(values[node.input[0]], axis=None) @ _rounded(weight, axis=0)
            else:
                exact = numpy_helper.to_array(weights[node.input[0]])
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

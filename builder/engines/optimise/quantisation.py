"""Dynamic int8: weights per output channel, activations quantised as they come, embeddings as a byte table.

On CPUs with VNNI the products are 8-bit dot products (MatMulInteger, fused by ONNX Runtime at load). Nodes and numbers
are those of ONNX Runtime's own quantiser (`quantize_dynamic` of onnxruntime.quantization), which holds several copies
of all weights and rounds column by column; here some rows are rounded at once, as they are written. The module also
chooses the layers that can be left in fp32, and their order: static int8 leaves the same. Knows graphs; knows nothing
about quality.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.common.errors import VerificationError
from builder.common.machine import largest_byte_weight
from builder.engines.optimise import Quantised
from builder.engines.optimise.activations import Feeds, watch
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, constant_products, eight_bit_scales, eight_bits, replace_nodes
from builder.graphs.onnx.weights import computed, computing, rows_of, values_of

EMBEDDING_BYTES = 1 << 20  # smaller tables save no memory worth an extra operator
PRODUCT, LOOKUP = "MatMul", "Gather"
SENSITIVITY_TOKENS = 1024  # the inputs of all layers are in memory at once: 0.8 MB a token with 28 layers of 1024


def quantise(graph: Graph, path: Path, left_alone: Collection[str] = ()) -> Quantised:
    """Write `graph` in dynamic int8 to `path`, all candidates except those named in `left_alone`.

    Raises VerificationError if a product was missed.
    """
    layers = candidates(graph)
    chosen = [name for name in layers if name not in left_alone]
    with computing():
        model = load_graph(graph.path)
        _Dynamic(model.graph).rewrite(chosen)
        drop_unused(model.graph)
        result = save_graph(model, path)
    expected = sum(layers[name] == PRODUCT for name in chosen)
    if not expected or result.operators["MatMulInteger"] != expected:
        raise VerificationError(
            f"{result.operators['MatMulInteger']} of {expected} matrix products were quantised; nothing was published. "
            "Use --precision fp32 for this checkpoint"
        )
    return Quantised(result, expected, len(chosen) - expected, tuple(left_alone))


class _Dynamic:
    """Nodes that replace those which read a weight, and the weight in bytes, each once."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.rounded: set[str] = set()

    def rewrite(self, chosen: Collection[str]) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in list(self.graph.node):
            if node.name not in chosen:
                nodes.append(node)
            else:
                nodes.extend(self._product(node) if node.op_type == PRODUCT else self._lookup(node))
        replace_nodes(self.graph, nodes)

    def _product(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield nodes for (int8(x) . int8(W)) * (x's scale * W's scales)."""
        (source, weight), output = node.input, node.output[0]
        if source not in self.rounded:
            self.rounded.add(source)
            outputs = [f"{source}_quantized", f"{source}_scale", f"{source}_zero_point"]
            yield helper.make_node("DynamicQuantizeLinear", [source], outputs, f"{source}_QuantizeLinear")
        if weight not in self.rounded:
            self.rounded.add(weight)
            store_matrix(self.graph, self.weights[weight], steps=largest_byte_weight())
        name, scales = f"{node.name}_quant", f"{node.name}_quant_scales_mul"
        inputs = [f"{source}_quantized", f"{weight}_quantized", f"{source}_zero_point", f"{weight}_zero_point"]
        whole, real = f"{output}_output_quantized", f"{output}_output_quantized_cast_output"
        yield helper.make_node("MatMulInteger", inputs, [whole], name)
        yield helper.make_node("Cast", [whole], [real], f"{whole}_cast", to=TensorProto.FLOAT)
        yield helper.make_node("Mul", [f"{source}_scale", f"{weight}_scale"], [f"{scales}:0"], scales)
        yield helper.make_node("Mul", [real, f"{scales}:0"], [output], f"{name}_output_scale_mul")

    def _lookup(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a lookup of bytes, and its values with one scale and one zero point for the whole table."""
        table, output = node.input[0], node.output[0]
        self._store_table(table)
        node.input[0], node.output[0] = f"{table}_quantized", f"{output}_quantized"
        yield node
        inputs = [node.output[0], f"{table}_scale", f"{table}_zero_point"]
        yield helper.make_node("DequantizeLinear", inputs, [output], f"{output}_DequantizeLinear")

    def _store_table(self, name: str) -> None:
        if name in self.rounded:
            return
        self.rounded.add(name)
        rows, values = rows_of(self.weights[name]), values_of(self.weights[name])
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
        step = (high - low) / 255 or 1.0
        scale, zero = np.float32(step), np.uint8(np.round(-low / step))

        def in_bytes(some: slice) -> np.ndarray:
            return np.asarray(np.clip(np.round(rows(some) / scale) + np.float32(zero), 0, 255).astype(np.uint8))

        integers = computed(f"{name}_quantized", TensorProto.UINT8, self.weights[name].dims, in_bytes)
        self.graph.initializer.append(integers)
        store_steps(self.graph, name, np.array(scale), np.array(zero))


def store_matrix(
    graph: onnx.GraphProto, matrix: TensorProto, per_channel: bool = True, steps: int = 127
) -> tuple[str, str]:
    """Store `matrix` in int8 as NAME_quantized, with a scale per column or one for all; return their names.

    The names are those of `store_steps`. `steps`: the largest absolute value of a weight.
    """
    rows, axis = rows_of(matrix), 0 if per_channel else None
    scales = eight_bit_scales(values_of(matrix), axis, steps)
    name, flat = matrix.name, scales.reshape(-1 if per_channel else ())
    integers = computed(f"{name}_quantized", TensorProto.INT8, matrix.dims, lambda some: eight_bits(rows(some), scales))
    graph.initializer.append(integers)
    return store_steps(graph, name, flat, np.zeros(flat.shape, np.int8))


def store_steps(graph: onnx.GraphProto, name: str, scale: np.ndarray, zero: np.ndarray) -> tuple[str, str]:
    """Store the scales and zero points of the tensor `name`, and return their names."""
    add_constant(graph, f"{name}_scale", scale)
    add_constant(graph, f"{name}_zero_point", zero)
    return f"{name}_scale", f"{name}_zero_point"


def candidates(graph: Graph) -> dict[str, str]:
    """Return node name to operator, for the products with constant weights and for lookups in large tables."""
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


def sensitivity(graph: Graph, layers: Mapping[str, str], feeds: Sequence[Feeds]) -> dict[str, float]:
    """Return the relative error that quantising each candidate alone puts into its own output, the largest first.

    Measured on `SENSITIVITY_TOKENS` of `feeds` at most, or on one row. Activations are quantised per tensor to 8 bits
    as DynamicQuantizeLinear does, weights per output channel, and the product is compared with the exact one in the
    Frobenius norm.
    """
    model = load_graph(graph.path)
    nodes = {node.name: node for node in model.graph.node if node.name in layers}
    read = {name for node in nodes.values() for name in node.input}
    weights = {tensor.name: values_of(tensor) for tensor in model.graph.initializer if tensor.name in read}
    products = [node.input[0] for node in nodes.values() if node.op_type == PRODUCT]
    calls = list(watch(model, products, _some_rows(feeds, SENSITIVITY_TOKENS)))
    errors = {}
    for name, node in nodes.items():
        if node.op_type == PRODUCT:
            weight = weights[node.input[1]]
            rounded = _rounded(weight, axis=0)
            inputs = [call[node.input[0]] for call in calls]
            errors[name] = sum(_distance(x @ weight, _rounded(x, axis=None) @ rounded) for x in inputs)
        else:
            table = weights[node.input[0]]
            errors[name] = len(calls) * _distance(table, _rounded(table, axis=None))
    return dict(sorted(errors.items(), key=lambda layer: layer[1], reverse=True))


def _some_rows(feeds: Sequence[Feeds], tokens: int) -> list[Feeds]:
    """Return the first rows of each call, one at least, of up to `tokens` tokens in all.

    If one row of each call is more, every second call is left out, or more of them; the first, which is the shortest,
    always gives a row. No row is cut: some graphs need its last token.
    """
    step = 1
    while step < len(feeds) and sum(feed["input_ids"].shape[1] for feed in feeds[::step]) > tokens:
        step += 1
    calls = feeds[::step]
    sizes = [feed["input_ids"].shape for feed in calls]
    spare = max(0, tokens - sum(length for _, length in sizes))
    others = max(1, sum((rows - 1) * length for rows, length in sizes))
    counts = [1 + min(rows - 1, spare * (rows - 1) // others) for rows, _ in sizes]
    return [{name: values[:count] for name, values in feed.items()} for feed, count in zip(calls, counts, strict=True)]


def _distance(exact: np.ndarray, rough: np.ndarray) -> float:
    return float(np.linalg.norm(exact - rough)) / max(float(np.linalg.norm(exact)), 1e-12)


def _rounded(values: np.ndarray, axis: int | None) -> np.ndarray:
    """Round to 8 bits: symmetric for each slice along `axis`, asymmetric over all values for None."""
    if axis is None:
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
        step = max((high - low) / 255, 1e-12)
        return np.clip(np.round((values - low) / step), 0, 255) * step + low
    step = np.maximum(np.abs(values).max(axis=axis, keepdims=True) / 127, 1e-12)
    return np.round(values / step) * step

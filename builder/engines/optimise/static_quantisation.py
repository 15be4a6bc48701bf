"""Static int8: the range of each activation is measured on samples, once, and written into the graph (QDQ form).

At run time nothing has to look for the largest value, and an answer does not depend on the rows beside it. Products
with constant matrices are quantised, inputs per tensor and weights per output channel; attention, normalisation and
what is left alone stay real. Nodes and numbers are those of ONNX Runtime's own quantiser (`quantize_static` of
onnxruntime.quantization), which rounds column by column and reads and writes the whole graph several times; here some
rows are rounded at once, as they are written. Both engines read the result. Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization.quant_utils import compute_scale_zp

from builder.common.errors import VerificationError
from builder.engines.optimise import Quantised
from builder.engines.optimise.activations import Feeds
from builder.engines.optimise.eight_bit_floats import to_float8
from builder.engines.optimise.quantisation import LOOKUP, candidates
from builder.engines.optimise.ranges import Range, ranges
from builder.engines.optimise.smoothing import smooth
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, eight_bit_lookup, eight_bit_scales, eight_bits, replace_nodes
from builder.graphs.onnx.weights import computed, computing, rows_of, values_of
from builder.options import Calibration

UNSIGNED, SIGNED = (np.uint8(0), np.uint8(255)), (np.int8(-127), np.int8(127))  # the steps of an activation


def quantise_statically(
    graph: Graph,
    path: Path,
    calibration: Calibration,
    feeds: Sequence[Feeds],
    left_alone: Collection[str] = (),
    lookups: bool = True,
    floats: bool = False,
) -> Quantised:
    """Write `graph` in int8 to `path`, all products and, unless told not to, large lookups, except for `left_alone`.

    With `floats` in fp8, which requires a symmetric calibration.

    Raises VerificationError if no product is left, and if one was missed.
    """
    layers = candidates(graph)
    chosen = {name for name, kind in layers.items() if kind != LOOKUP and name not in left_alone}
    if not chosen:
        raise _missed(0, 0)
    tables = {n for n, k in layers.items() if lookups and k == LOOKUP and n not in left_alone}
    with computing():
        model = load_graph(graph.path)
        if calibration.smooth:
            smooth(model, calibration.smooth, feeds, left_alone)
        _eight_bit_lookups(model.graph, tables)
        drop_unused(model.graph)
        sources = list(dict.fromkeys(node.input[0] for node in model.graph.node if node.name in chosen))
        steps = _Steps(model.graph, calibration, ranges(model, sources, calibration.method, feeds))
        steps.put_before(chosen)
        if floats:
            to_float8(model.graph, steps.weights)
        drop_unused(model.graph)
        done = _quantised(model.graph, chosen)
        if done != len(chosen):
            raise _missed(done, len(chosen))
        return Quantised(save_graph(model, path), done, len(tables), tuple(left_alone))


def _quantised(graph: onnx.GraphProto, products: Collection[str]) -> int:
    """Return how many of `products` read nothing but outputs of DequantizeLinear."""
    real = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return sum(node.name in products and set(node.input) <= real for node in graph.node)


def _missed(done: int, products: int) -> VerificationError:
    return VerificationError(
        f"{done} of {products} matrix products were quantised; nothing was published. Use --precision fp32 for this "
        "checkpoint"
    )


def _eight_bit_lookups(graph: onnx.GraphProto, chosen: Collection[str]) -> None:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.name in chosen:
            nodes.extend(eight_bit_lookup(graph, node, values_of(weights[node.input[0]])))
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)


class _Steps:
    """Nodes that round the inputs of products to 8 bits, or make bytes real again, each once for all readers."""

    def __init__(self, graph: onnx.GraphProto, calibration: Calibration, ranges: Mapping[str, Range]) -> None:
        self.graph, self.calibration, self.ranges = graph, calibration, ranges
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.rounded: dict[str, str] = {}  # by name of a tensor, the one that replaces it

    def put_before(self, products: Collection[str]) -> None:
        """Round the inputs of `products` before the first node that reads them: others read them rounded too."""
        readers = [node for node in self.graph.node if node.name in products]
        sources, matrices = {node.input[0] for node in readers}, {node.input[1] for node in readers}
        nodes: list[onnx.NodeProto] = []
        for node in self.graph.node:
            for name in node.input:
                if name in sources | matrices and name not in self.rounded:
                    nodes.extend(self._of_source(name) if name in sources else self._of_matrix(name))
            nodes.append(node)
        for node in self.graph.node:
            node.input[:] = [self.rounded.get(name, name) for name in node.input]
        replace_nodes(self.graph, nodes)

    def _of_source(self, name: str) -> Iterator[onnx.NodeProto]:
        steps = self._store_range(name)
        integers = f"{name}_QuantizeLinear_Output"
        yield helper.make_node("QuantizeLinear", [name, *steps], [integers], f"{name}_QuantizeLinear")
        yield self._real(name, integers, steps)

    def _of_matrix(self, name: str) -> Iterator[onnx.NodeProto]:
        axis = 1 if self.calibration.per_channel else None
        yield self._real(name, f"{name}_quantized", self._store_matrix(name), axis)

    def _real(self, name: str, integers: str, steps: Sequence[str], axis: int | None = None) -> onnx.NodeProto:
        self.rounded[name] = f"{name}_DequantizeLinear_Output"
        inputs, outputs = [integers, *steps], [self.rounded[name]]
        return helper.make_node("DequantizeLinear", inputs, outputs, f"{name}_DequantizeLinear", axis=axis)

    def _store_range(self, name: str) -> tuple[str, str]:
        symmetric = self.calibration.symmetric
        zero, scale = compute_scale_zp(*self.ranges[name], *(SIGNED if symmetric else UNSIGNED), symmetric)
        return self._store(name, scale.reshape(()), zero.reshape(()))

    def _store_matrix(self, name: str) -> tuple[str, str]:
        tensor, per_channel = self.weights[name], self.calibration.per_channel
        rows, scales = rows_of(tensor), eight_bit_scales(values_of(tensor), axis=0 if per_channel else None)
        integers = computed(
            f"{name}_quantized", TensorProto.INT8, tensor.dims, lambda some: eight_bits(rows(some), scales)
        )
        self.graph.initializer.append(integers)
        flat = scales.reshape(-1 if per_channel else ())
        return self._store(name, flat, np.zeros(flat.shape, np.int8))

    def _store(self, name: str, scale: np.ndarray, zero: np.ndarray) -> tuple[str, str]:
        add_constant(self.graph, f"{name}_scale", scale)
        add_constant(self.graph, f"{name}_zero_point", zero)
        return f"{name}_scale", f"{name}_zero_point"

"""Static int8: the range of each activation is measured on samples, once, and written into the graph (QDQ form).

At run time nothing has to look for the largest value, and an answer does not depend on the rows beside it. Products
with constant matrices are quantised, inputs per tensor and weights per output channel; attention, normalisation and
what is left alone stay real. Nodes and numbers are those of ONNX Runtime's own quantiser (`quantize_static` of
onnxruntime.quantization), which rounds column by column and reads and writes the whole graph several times; here some
rows are rounded at once, as they are written. Both engines read the result.

fp8 is the same with floats of 8 bits, E4M3, in place of integers: their steps are finer near zero. Knows graphs; knows
nothing about quality.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, create_calibrator
from onnxruntime.quantization.quant_utils import compute_scale_zp

from builder.common.errors import VerificationError
from builder.common.workplace import temporary_folder
from builder.engines.onnxruntime import open_unoptimised
from builder.engines.optimise import Quantised
from builder.engines.optimise.activations import Feeds, watch
from builder.engines.optimise.quantisation import LOOKUP, candidates, store_matrix, store_steps
from builder.engines.optimise.smoothing import smooth
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.graph import MODEL_FILE, Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import eight_bit_lookup, replace_nodes
from builder.graphs.onnx.weights import computing, values_of
from builder.options import Calibration

UNSIGNED, SIGNED = (np.uint8(0), np.uint8(255)), (np.int8(-127), np.int8(127))  # the steps of an activation
MAX_FLOAT8 = 448.0  # of E4M3: "FP8 Formats for Deep Learning", Micikevicius et al. 2022
QUANTISED = "_quantized"  # suffix that ONNX Runtime's quantiser appends to the name of a weight
METHODS = {
    "min-max": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
OBSERVER = "Shape"  # its output is integers, which calibrators ignore

Range = tuple[np.ndarray, np.ndarray]  # the lowest and the highest value, fp32, of one element each


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
        steps = _Steps(model.graph, calibration, _ranges(model, sources, calibration.method, feeds))
        steps.put_before(chosen)
        if floats:
            _to_float8(model.graph, steps.weights)
        drop_unused(model.graph)
        real = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
        done = sum(node.name in chosen and set(node.input) <= real for node in model.graph.node)
        if done != len(chosen):
            raise _missed(done, len(chosen))
        return Quantised(save_graph(model, path), done, len(tables), tuple(left_alone))


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
        symmetric = self.calibration.symmetric
        zero, scale = compute_scale_zp(*self.ranges[name], *(SIGNED if symmetric else UNSIGNED), symmetric)
        steps = store_steps(self.graph, name, scale.reshape(()), zero.reshape(()))
        integers = f"{name}_QuantizeLinear_Output"
        yield helper.make_node("QuantizeLinear", [name, *steps], [integers], f"{name}_QuantizeLinear")
        yield self._real(name, integers, steps)

    def _of_matrix(self, name: str) -> Iterator[onnx.NodeProto]:
        per_channel = self.calibration.per_channel
        steps = store_matrix(self.graph, self.weights[name], per_channel)
        yield self._real(name, f"{name}_quantized", steps, 1 if per_channel else None)

    def _real(self, name: str, integers: str, steps: Sequence[str], axis: int | None = None) -> onnx.NodeProto:
        self.rounded[name] = f"{name}_DequantizeLinear_Output"
        inputs, outputs = [integers, *steps], [self.rounded[name]]
        return helper.make_node("DequantizeLinear", inputs, outputs, f"{name}_DequantizeLinear", axis=axis)


def _ranges(model: onnx.ModelProto, names: Sequence[str], method: str, feeds: Sequence[Feeds]) -> dict[str, Range]:
    """Return the range of each of the tensors `names` of `model` on `feeds`, by one of METHODS.

    ONNX Runtime's own calibrators find them. They read a model file; theirs here has the activations as inputs, so that
    none of them loads the weights.
    """
    with temporary_folder() as folder:
        path = folder / MODEL_FILE
        onnx.save(_observed(model, names), path)
        calibrator = create_calibrator(path, [OBSERVER], str(folder / "augmented.onnx"), METHODS[method])
        for values in watch(model, names, feeds, open_unoptimised):
            calibrator.collect_data(_Call(values))
        found = calibrator.compute_data()
    return {name: found[name].range_value for name in names}


def _observed(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a model with the tensors `names` of `model` as inputs of any shape; it computes nothing of them."""
    nodes = [helper.make_node(OBSERVER, [name], [f"{name}.shape"]) for name in names]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    outputs = [helper.make_tensor_value_info(f"{name}.shape", TensorProto.INT64, None) for name in names]
    graph = helper.make_graph(nodes, "observed", inputs, outputs)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


class _Call(CalibrationDataReader):  # type: ignore[misc]  # the calibrator's own interface
    """Reader that gives one call: calibrators do not merge calls of unequal lengths."""

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.pending = iter([values])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.pending, None)


def _to_float8(graph: onnx.GraphProto, weights: Mapping[str, TensorProto]) -> None:
    """Make every symmetric int8 pair of `graph` one of fp8; `weights`: the matrices before they were rounded.

    The ranges are those measured for int8: the largest value, 127 steps, becomes the largest of E4M3.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    rescaled: set[str] = set()
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        values, scale, zero = node.input
        if scale not in rescaled:
            rescaled.add(scale)
            steps = numpy_helper.to_array(tensors[scale]) * np.float32(127 / MAX_FLOAT8)
            tensors[scale].CopyFrom(numpy_helper.from_array(steps, scale))
            shape = tuple(tensors[zero].dims)
            tensors[zero].CopyFrom(_float8(np.zeros(shape, np.float32), zero))
        if values in tensors:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            steps = numpy_helper.to_array(tensors[scale])
            steps = np.expand_dims(steps, 1 - axis) if steps.ndim else steps
            tensors[values].CopyFrom(_float8(values_of(weights[values.removesuffix(QUANTISED)]) / steps, values))


def _float8(values: np.ndarray, name: str) -> TensorProto:
    """Return `values` rounded to E4M3, cut at its largest."""
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)
    content = np.clip(values, -MAX_FLOAT8, MAX_FLOAT8).astype(dtype).tobytes()
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, values.shape, content, raw=True)

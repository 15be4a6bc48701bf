"""Static int8: the range of each activation is measured on samples, once, and written into the graph (QDQ form).

At run time nothing has to look for the largest value, and an answer does not depend on the rows beside it. Products
with constant matrices are quantised, inputs per tensor and weights per output channel; attention, normalisation and
what is left alone stay real. ONNX Runtime's own calibrators and its quantiser do the work. Both engines read the
result. Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from builder.errors import VerificationError
from builder.onnx.cleanup import drop_unused
from builder.onnx.graph import EXTERNAL_FROM, MODEL_FILE, Graph, load_whole, save_graph
from builder.onnx.nodes import constant_products, eight_bit_lookup, replace_nodes
from builder.optimise.activations import Feeds
from builder.optimise.eight_bit_floats import to_float8
from builder.optimise.quantisation import LOOKUP, candidates
from builder.optimise.quantised import Quantised
from builder.optimise.smoothing import smooth
from builder.spec import Calibration
from builder.workplace import scratch

METHODS = {
    "min-max": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}


def quantise_statically(
    graph: Graph,
    path: Path,
    calibration: Calibration,
    feeds: Sequence[Feeds],
    left_alone: Collection[str] = (),
    lookups: bool = True,
    floats: bool = False,
) -> Quantised:
    """Write `graph` in int8 to `path`, all products and, unless told not to, large lookups, but those of `left_alone`.

    With `floats` in fp8, which wants a symmetric calibration.

    Raises VerificationError where a product was missed.
    """
    model = load_whole(graph.path)
    layers = candidates(graph)
    chosen = [name for name, kind in layers.items() if kind != LOOKUP and name not in left_alone]
    if calibration.smooth:
        smooth(model, calibration.smooth, feeds, left_alone)
    tables = {n for n, k in layers.items() if lookups and k == LOOKUP and n not in left_alone}
    rounded = _eight_bit_lookups(model.graph, tables)
    drop_unused(model.graph)
    _state_types(model.graph)
    result = _with_steps(model, graph, calibration, feeds, chosen)
    if floats:
        to_float8(result.graph, {t.name: numpy_helper.to_array(t) for t in model.graph.initializer})
    done = _quantised_products(result.graph)
    if not chosen or done != len(chosen):
        raise VerificationError(
            f"{done} of {len(chosen)} matrix products were quantised; nothing was published. Use --precision fp32 for "
            "this checkpoint"
        )
    return Quantised(save_graph(result, path), done, rounded, tuple(left_alone))


def _state_types(graph: onnx.GraphProto) -> None:
    """Declare the inputs of matrix products as fp32. The calibrator measures only tensors whose type is declared, and
    ONNX's shape inference, which would declare them, stops at operators of ONNX Runtime.
    """
    known = {value.name for value in graph.value_info}
    for name in dict.fromkeys(node.input[0] for node in constant_products(graph)):
        if name not in known:
            graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))


def _eight_bit_lookups(graph: onnx.GraphProto, chosen: Collection[str]) -> int:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.name in chosen:
            nodes.extend(eight_bit_lookup(graph, node, numpy_helper.to_array(weights[node.input[0]])))
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)
    return len(chosen)


def _with_steps(
    model: onnx.ModelProto, graph: Graph, calibration: Calibration, feeds: Sequence[Feeds], chosen: list[str]
) -> onnx.ModelProto:
    """`model`, made of `graph`, with the products `chosen` between steps of 8 bits, as ONNX Runtime measures them."""
    with scratch() as folder:
        prepared = folder / "prepared" / MODEL_FILE
        save_graph(model, prepared)
        written = folder / MODEL_FILE
        quantize_static(
            str(prepared),
            str(written),
            _Reader(graph, feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=chosen,
            per_channel=calibration.per_channel,
            activation_type=QuantType.QInt8 if calibration.symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=METHODS[calibration.method],
            use_external_data_format=graph.size >= EXTERNAL_FROM,
            extra_options={
                "DefaultTensorType": onnx.TensorProto.FLOAT,
                "ActivationSymmetric": calibration.symmetric,
                "OpTypesToExcludeOutputQuantization": ["MatMul"],
                "CalibStridedMinMax": 1,  # of every method, in spite of its name
            },
        )
        result = onnx.load(str(written))
    result.ir_version = graph.ir_version
    return result


def _quantised_products(graph: onnx.GraphProto) -> int:
    """Products whose two inputs both come out of DequantizeLinear."""
    real = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return sum(node.op_type == "MatMul" and set(node.input) <= real for node in graph.node)


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # the quantiser's own interface
    """Hands out one call at a time: the calibrators do not merge calls of unequal lengths."""

    def __init__(self, graph: Graph, feeds: Sequence[Feeds]) -> None:
        self.feeds = [{name: np.asarray(feed[name]) for name in graph.inputs} for feed in feeds]
        self.pending: Iterator[dict[str, Any]] = iter(())

    def __len__(self) -> int:
        return len(self.feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.pending = iter(self.feeds[start_index:end_index])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.pending, None)

"""Ranges of activations on samples, as ONNX Runtime's own calibrators find them.

They read a model file; theirs here has the activations as inputs, so that none of them loads the weights. Knows graphs;
knows nothing about the use of a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, create_calibrator

from builder.common.workplace import temporary_folder
from builder.engines.onnxruntime import open_as_it_is
from builder.engines.optimise.activations import Feeds, watch
from builder.graphs.onnx.graph import MODEL_FILE

METHODS = {
    "min-max": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
OBSERVER = "Shape"  # its output is integers, which calibrators ignore

Range = tuple[np.ndarray, np.ndarray]  # the lowest and the highest value, fp32, of one element each


def ranges(model: onnx.ModelProto, names: Sequence[str], method: str, feeds: Sequence[Feeds]) -> dict[str, Range]:
    """Return the range of each of the tensors `names` of `model` on `feeds`, by one of METHODS."""
    with temporary_folder() as folder:
        path = folder / MODEL_FILE
        onnx.save(_observed(model, names), path)
        calibrator = create_calibrator(path, [OBSERVER], str(folder / "augmented.onnx"), METHODS[method])
        for values in watch(model, names, feeds, open_as_it_is):
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

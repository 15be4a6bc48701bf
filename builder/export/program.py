"""torch.export to an ONNX model that every supported release reads. Knows modules and tensors; writes no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch

from builder.errors import ExportError
from builder.export.cleanup import clean

OPSET = 20  # the newest that every supported release reads
IR_VERSION = 9


def to_onnx(
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    dynamic_axes: Sequence[Mapping[int, Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """Export `module`, whose forward takes `tensors` by position; `dynamic_axes` has one mapping a tensor.

    Raises whatever the module raises, and ExportError.
    """
    module.eval()
    with torch.no_grad():
        program = torch.onnx.export(
            module,
            tuple(tensors),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(tuple(dynamic_axes),),
            input_names=list(inputs),
            output_names=list(outputs),
            verbose=False,
        )
    if program is None:
        raise ExportError("torch.onnx.export made no program")
    model: onnx.ModelProto = program.model_proto
    clean(model)
    model.ir_version = IR_VERSION
    return model

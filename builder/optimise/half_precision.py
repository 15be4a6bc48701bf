"""fp16: real constants in half the bytes; products in fp16 where the engine has them, fp32 where it does not.

ONNX Runtime's own converter, which leaves in fp32 the operators that lose too much in fp16. On a CPU this saves
memory, not time. Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

from builder.errors import VerificationError
from builder.export.graph import Graph, save_graph


def to_half(graph: Graph, path: Path) -> Graph:
    """Write `graph` in fp16 to `path`; its inputs and outputs stay as they are. Raises VerificationError."""
    model = convert_float_to_float16(onnx.load(str(graph.path)), keep_io_types=True, disable_shape_infer=True)
    if not any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer):
        raise VerificationError("no constant became fp16; nothing was published. Use --precision fp32")
    return save_graph(model, path)

"""Constants computed once, before TensorRT sees them: its parser wants shapes and axes as constants.

polygraphy's folding, over onnx-graphsurgeon. Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from polygraphy.backend.onnx import fold_constants as fold
from polygraphy.logger import G_LOGGER

from builder.errors import ExportError
from builder.export.graph import Graph, save_graph


def fold_constants(graph: Graph, folder: Path) -> Graph:
    """Write `graph` with its constants folded into `folder`. Raises ExportError for operators TensorRT lacks."""
    with G_LOGGER.verbosity(G_LOGGER.ERROR):
        model = fold(onnx.load(str(graph.path)), allow_onnxruntime_shape_inference=False)
    foreign = sorted({node.op_type for node in model.graph.node if node.domain not in ("", "ai.onnx")})
    if foreign:
        raise ExportError(f"TensorRT has no {', '.join(foreign)}; use --target cuda")
    return save_graph(model, folder / "folded" / graph.path.name)

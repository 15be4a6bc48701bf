"""Error of a graph against PyTorch's answers, over the batches that a build compares."""

from __future__ import annotations

from builder.building.verify.parity import error_at, usual_references
from builder.checkpoints.tasks.base import TaskGraph
from builder.engines import infer_with
from builder.graphs.export.rows import Rows
from builder.graphs.onnx.graph import Graph


def graph_error(graph: Graph, module: TaskGraph, rows: Rows, max_length: int, per_token: bool) -> float:
    """Return the largest relative error of `graph` against `module` on `rows`, without padded positions.

    Raises VerificationError for NaN.
    """
    infer = infer_with(graph, 1)
    return max(error_at(infer, graph, reference, per_token) for reference in usual_references(module, rows, max_length))

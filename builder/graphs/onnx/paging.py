"""Shared parts of the lowerings of a decoder to attention over blocks: uses of the rows outside of attention.

All tokens of a call are one row, and there is no cache of so many rows and positions. Knows graphs; knows no engine.
"""

from __future__ import annotations

import onnx

from builder.common.errors import ExportError
from builder.graphs.onnx.nodes import attributes_of


def count_one_row(node: onnx.NodeProto, advice: str) -> None:
    """Let `node`, a Shape that reads the number of rows from the cache, return 1: all tokens are one row.

    Raises ExportError for other uses.
    """
    attributes = attributes_of(node)
    if (attributes.get("start", 0), attributes.get("end")) != (0, 1):
        raise ExportError(f"it computes with the length of its cache, which a paged cache does not have; {advice}")
    node.input[0] = "input_ids"


def refuse_leftovers(graph: onnx.GraphProto, advice: str) -> None:
    """Raise ExportError if a node reads a tensor that no longer exists."""
    known = {"", *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    known |= {name for node in graph.node for name in node.output}
    missing = sorted({name for node in graph.node for name in node.input} - known)
    if missing:
        raise ExportError(f"it computes with {missing[0]}, which a paged cache does not have; {advice}")

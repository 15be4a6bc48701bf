"""Its models in config.pbtxt."""

from __future__ import annotations

from builder.engines.placement import Placement, on_cpu
from builder.engines.profiles import Calls
from builder.graphs.onnx.graph import Graph
from builder.options import LayoutOptions


def place(options: LayoutOptions, graph: Graph, calls: Calls) -> Placement:
    return on_cpu(options, {"longest": str(calls.length)})

"""Its models in config.pbtxt."""

from __future__ import annotations

from builder.onnx.graph import Graph
from builder.spec import LayoutOptions
from builder.triton.placement import Placement, on_cpu
from builder.triton.profiles import Calls


def place(options: LayoutOptions, graph: Graph, calls: Calls) -> Placement:
    return on_cpu(options, {"longest": str(calls.length)})

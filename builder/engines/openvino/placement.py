"""OpenVINO's models in config.pbtxt."""

from __future__ import annotations

from builder.engines.openvino import parameters
from builder.engines.placement import Placement, on_cpu
from builder.engines.profiles import Calls
from builder.graphs.onnx.graph import Graph
from builder.options import LayoutOptions


def place(options: LayoutOptions, graph: Graph, calls: Calls) -> Placement:
    """Place instances on the CPU. Raises SpecError for an option that the backend cannot take."""
    return on_cpu(options, parameters(graph, options.threads, options.instances))

"""OpenVINO's models in config.pbtxt."""

from __future__ import annotations

from builder.engines.openvino import parameters
from builder.onnx.graph import Graph
from builder.spec import LayoutOptions
from builder.triton.placement import Placement, on_cpu
from builder.triton.profiles import Calls


def place(options: LayoutOptions, graph: Graph, calls: Calls) -> Placement:
    """Place instances on the CPU. Raises SpecError for an option that the backend cannot take."""
    return on_cpu(options, parameters(graph, options.threads, options.instances))

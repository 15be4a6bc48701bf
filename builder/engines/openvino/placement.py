"""OpenVINO's models in config.pbtxt."""

from __future__ import annotations

from builder.engines.openvino import parameters
from builder.onnx.graph import Graph
from builder.spec import LayoutOptions
from builder.triton.placement import Placement, on_cpu
from builder.triton.profiles import Calls


def place(options: LayoutOptions, graph: Graph, calls: Calls) -> Placement:
    """Instances on the CPU. Raises SpecError for what the backend cannot be told."""
    return on_cpu(options, parameters(graph, options.threads, options.instances))

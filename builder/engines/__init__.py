"""Inference engines: one file each, named as the Triton backend that runs its graphs.

A file says how a graph is opened (`infer`) and what config.pbtxt tells the backend (`parameters`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from builder.onnx.graph import Graph

Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class Engine(Protocol):
    MODEL_FILE: str

    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open `graph` on the CPU: named arrays in, named arrays out."""
        ...

    def parameters(self, graph: Graph, threads: int, instances: int) -> dict[str, str]:
        """The `parameters` of config.pbtxt with which Triton runs `graph` in the same way, `threads` an instance."""
        ...


def engine(name: str) -> Engine:
    """The engine of a graph, by `Graph.engine`."""
    module: Engine = importlib.import_module(f"{__name__}.{name}")
    return module


def infer_with(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open `graph` in the engine it was made for, with `threads` threads."""
    return engine(graph.engine).infer(graph, threads, spinning)

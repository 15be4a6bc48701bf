"""Rewrites of graphs that make them faster or smaller, and the result of quantising one by any method."""

from __future__ import annotations

from dataclasses import dataclass

from builder.graphs.onnx.graph import Graph


@dataclass(frozen=True)
class Quantised:
    """Graph, how many of its products and lookups are quantised, and the names of those that were left alone."""

    graph: Graph
    matmuls: int = 0
    embeddings: int = 0
    left_alone: tuple[str, ...] = ()

"""Rewrites of graphs that make them faster or smaller, and the result of quantising one by any method."""

from __future__ import annotations

from dataclasses import dataclass

from builder.graphs.onnx.graph import Graph


@dataclass(frozen=True)
class Quantised:
    """Graph, how many of its products and lookups are quantised, and the names of those that were left alone.

    `as_stored`: how many of the products, mixtures of experts included, have the checkpoint's own codes.
    `rounded_experts`: how many mixtures of experts have none, although the checkpoint's codes are served.
    """

    graph: Graph
    matmuls: int = 0
    embeddings: int = 0
    left_alone: tuple[str, ...] = ()
    as_stored: int = 0
    rounded_experts: int = 0

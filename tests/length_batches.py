"""Batches of texts of similar length; in a single batch, three quarters would be padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from builder.engines import infer_with
from builder.graphs.onnx.graph import Graph

Feed = dict[str, np.ndarray]
ROWS = 4


def batches(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Feed]:
    """Return batches with (rows, tokens) for every input of a graph, the shortest texts first."""
    ordered = sorted(texts, key=len)
    few = (ordered[start : start + ROWS] for start in range(0, len(ordered), ROWS))
    return [dict(tokenizer(some, return_tensors="np", padding=True)) for some in few]


def features(graph: Graph, feeds: Sequence[Feed]) -> np.ndarray:
    """Return the graph's features of all batches (rows, features)."""
    infer = infer_with(graph, 1)
    return np.concatenate([infer({name: feed[name] for name in graph.inputs})["features"] for feed in feeds])

"""The graph against PyTorch, number by number, over batches of mixed lengths.

Knows tensors; the served answers are compared in `quality`.
"""

from __future__ import annotations

import numpy as np
import torch

from builder.engines import infer_with
from builder.errors import VerificationError
from builder.export.encoder import TOKENIZER_INPUTS
from builder.export.graph import Graph
from builder.tasks.base import TaskGraph

TOLERANCE = 1e-4  # relative to the largest value of an output
LONGEST = 300  # longer than every sliding window in use; memory stays small


def graph_error(
    graph: Graph, module: TaskGraph, vocabulary: int, max_length: int, threads: int, per_token: bool
) -> float:
    """The largest relative error of `graph` against `module` over single rows, mixed batches and their reverse.

    Rows of a batch are padded on the right; only positions of tokens count. Raises VerificationError for NaN.
    """
    infer = infer_with(graph, threads)
    generator = np.random.default_rng(0)
    longest = min(max_length, LONGEST)
    mixed = [min(length, longest) for length in (3, 17, 64, longest)]
    error = 0.0
    for lengths in ([4], [longest], mixed, mixed[::-1]):
        feeds = _random_feeds(module.inputs, lengths, vocabulary, generator)
        with torch.no_grad():
            expected = module(*(torch.from_numpy(feeds[name]) for name in module.inputs))
        actual = infer({name: feeds[name] for name in graph.inputs})
        for name, tensor in zip(module.outputs, expected, strict=True):
            a, b = tensor.numpy(), actual[name]
            if a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all():
                raise VerificationError(
                    f"output {name} has shape {b.shape} in the graph and {a.shape} in PyTorch, or one holds NaN. "
                    "Nothing was published: check the checkpoint's weights"
                )
            if per_token and a.ndim > 1 and a.shape[1] == feeds["attention_mask"].shape[1]:
                keep = feeds["attention_mask"].astype(bool)
                a, b = a[keep], b[keep]
            error = max(error, float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)))
    return error


def _random_feeds(
    names: tuple[str, ...], lengths: list[int], vocabulary: int, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    shape = (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    feeds = {}
    for name in names:
        if name == "attention_mask":
            feeds[name] = mask
        elif name == "input_ids":
            feeds[name] = generator.integers(vocabulary // 4, vocabulary, shape) * mask
        elif name in TOKENIZER_INPUTS:
            feeds[name] = np.zeros(shape, dtype=np.int64)
        else:
            feeds[name] = np.stack([generator.integers(0, length, 2) for length in lengths])
    return feeds

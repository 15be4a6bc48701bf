"""The graph against PyTorch, number by number: batches of mixed lengths, and rows of the longest texts served.

Knows tensors; the served answers are compared in `quality`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from builder.checkpoints.tasks.base import TaskGraph
from builder.common.errors import VerificationError
from builder.engines import Infer
from builder.graphs.export.failure import reason
from builder.graphs.export.rows import Rows
from builder.graphs.onnx.graph import Graph

TOLERANCE = 1e-4  # relative to the largest value of an output
USUAL = 300  # tokens: every variant is compared up to here, where memory stays small


@dataclass(frozen=True)
class BatchReference:
    """PyTorch's answer to one batch."""

    lengths: tuple[int, ...]  # tokens of each row
    feeds: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


def reference(module: TaskGraph, rows: Rows, lengths: Sequence[int], seed: int = 0) -> BatchReference:
    """Run `module` on one batch of rows of `lengths` tokens."""
    feeds = rows.feeds(module.inputs, lengths, seed)
    with torch.no_grad():
        outputs = module(*(torch.from_numpy(feeds[name]) for name in module.inputs))
    arrays = {name: output.numpy() for name, output in zip(module.outputs, outputs, strict=True)}
    return BatchReference(tuple(lengths), feeds, arrays)


def long_references(module: TaskGraph, rows: Rows, max_length: int) -> tuple[BatchReference, ...]:
    """Return PyTorch's answers to single rows of the longest texts served, beyond what every graph is compared on.

    To be called on a model that has answered nothing yet, longest first: BigBird, for one, changes its attention
    permanently at the first short text. Three rows at most: all positions, one fewer (another remainder for code that
    works in blocks), and half as many. Raises VerificationError if PyTorch's model has no answer itself.
    """
    lengths = sorted({max_length, max_length - 1, max_length // 2 + 1}, reverse=True)
    return tuple(_answered(module, rows, length) for length in lengths if length > USUAL or length == max_length)


def _answered(module: TaskGraph, rows: Rows, length: int) -> BatchReference:
    """Return the answer to one row of `length` tokens. Raises VerificationError if the model has none.

    Some models cannot use all their positions: BigBird's sparse attention pads a text to whole blocks.
    """
    try:
        return reference(module, rows, [length])
    except Exception as error:  # whatever the model's own code raises
        raise VerificationError(
            f"PyTorch's own {module.model.config.model_type} does not answer a text of {length} tokens: "
            f"{reason(error)}. Nothing was published: use a smaller --max-length where the length is the cause"
        ) from error


def usual_references(module: TaskGraph, rows: Rows, max_length: int) -> tuple[BatchReference, ...]:
    """Return PyTorch's answers to a short row, and to batches padded on the right.

    Those have nearly all of the first row padded, with the longest after it, and rows that get shorter. A long row
    alone is of `long_references`.
    """
    longest = min(max_length, USUAL)
    short, middle, long = (min(length, longest) for length in (5, 17, 64))
    batches = ([short], [short, longest], [long, middle, short])
    return tuple(reference(module, rows, lengths, seed) for seed, lengths in enumerate(batches))


def error_at(infer: Infer, graph: Graph, reference: BatchReference, per_token: bool) -> float:
    """Return the largest relative error of `graph`, opened as `infer`, on one batch.

    Raises VerificationError for NaN.
    """
    actual = infer({name: reference.feeds[name] for name in graph.inputs})
    return max(
        _difference(name, output, actual[name], reference, per_token) for name, output in reference.outputs.items()
    )


def _difference(name: str, a: np.ndarray, b: np.ndarray, reference: BatchReference, per_token: bool) -> float:
    if a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all():
        raise VerificationError(
            f"output {name} has shape {b.shape} in the graph and {a.shape} in PyTorch, or one holds NaN. "
            "Nothing was published: check the checkpoint's weights"
        )
    if per_token and a.ndim > 1 and a.shape[1] == max(reference.lengths):
        keep = np.arange(a.shape[1]) < np.array(reference.lengths)[:, None]
        a, b = a[keep], b[keep]
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6))

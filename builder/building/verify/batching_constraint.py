"""Constraint on the rows of one engine call; found by running PyTorch, since no configuration contains it.

Padding gets into the answers of models with parts that no attention mask reaches (the Fourier transform of FNet,
arXiv:2105.03824; the convolutions of ConvBERT, arXiv:2008.02496). Heads that pool at the end token, as BART's, take as
many of them from each row. Rotary positions that are scaled by length (longrope, arXiv:2402.13753) are scaled for all
rows by the longest.
"""

from __future__ import annotations

import numpy as np
import torch

from builder.building.verify.parity import TOLERANCE, BatchReference, reference
from builder.checkpoints.tasks.base import TaskGraph
from builder.graphs.export.rotary import changes_beyond
from builder.graphs.export.rows import Rows
from builder.runtime.contract import Alike

SHORT, PADDED = 9, 40  # tokens


def batching_constraint(module: TaskGraph, rows: Rows, max_length: int) -> Alike:
    """Return the property that rows of one call must share: none, their length, or the count of a token id."""
    short, padded = min(SHORT, max_length), min(PADDED, max_length)
    changes = changes_beyond(module.model)
    if changes is not None and max_length > changes:
        return "length"
    if rows.after and not _answers_unequal_numbers(module, rows, short):
        return rows.after[-1]
    one, beside = reference(module, rows, [short]), reference(module, rows, [short, padded])
    return "length" if first_row_distance(one, beside) > TOLERANCE else None


def _answers_unequal_numbers(module: TaskGraph, rows: Rows, length: int) -> bool:
    """Return True if the last special token may be in one row more often than in another."""
    feeds = rows.feeds(module.inputs, [length, length])
    feeds["input_ids"][0, len(rows.before)] = rows.after[-1]
    try:
        with torch.no_grad():
            module(*(torch.from_numpy(feeds[name]) for name in module.inputs))
    except (ValueError, RuntimeError):
        return False
    return True


def first_row_distance(one: BatchReference, other: BatchReference) -> float:
    """Return the largest relative difference of the first row of two answers, over the tokens of `one`'s."""
    distances = [0.0]
    for name, values in one.outputs.items():
        a, b = values[0], other.outputs[name][0]
        b = b[tuple(slice(size) for size in a.shape)]
        distances.append(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)))
    return max(distances)

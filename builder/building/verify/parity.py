"""An encoder's graph against PyTorch, number by number, and why they differ; which rows may share a call.

Compares batches of mixed lengths, and rows of the longest texts served. `quality` compares the served answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.model import load_model
from builder.checkpoints.tasks.base import TaskGraph, encoder_task
from builder.common.errors import VerificationError
from builder.engines import Infer, infer_with
from builder.graphs.export.failure import reason
from builder.graphs.export.rotary import changes_beyond
from builder.graphs.export.rows import Rows
from builder.graphs.onnx.graph import Graph
from builder.runtime.contract import Alike
from builder.runtime.lora import LORA_HEAD

TOLERANCE = 1e-4  # relative to the largest value of an output
USUAL = 300  # tokens: every variant is compared up to here, where memory stays small
MAX_BLOCK = 512  # tokens: the largest block that attention works in, Longformer's; CANINE's and LongT5's is 128
SHORT, PADDED = 9, 40  # tokens of the rows that show whether padding changes an answer
BUG = "this is a bug worth reporting, with the checkpoint's name"


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
    permanently at the first short text. Raises VerificationError if PyTorch's model has no answer itself.
    """
    answers = []
    for length in long_lengths(max_length):
        try:
            answers.append(reference(module, rows, [length]))
        except Exception as error:  # whatever the model's own code raises: BigBird cannot use all its positions
            raise VerificationError(
                f"PyTorch's own {module.model.config.model_type} does not answer a text of {length} tokens: "
                f"{reason(error)}. Nothing was published: use a smaller --max-length where the length is the cause"
            ) from error
    return tuple(answers)


def long_lengths(max_length: int) -> tuple[int, ...]:
    """Return the tokens of the long rows: all positions, and about half as many, longer than `USUAL`.

    The second row leaves the remainder of one token fewer than the first, for code that works in blocks of up to an
    eighth of all positions (powers of two; BigBird's have 64 tokens), so that it is never much longer than half.
    """
    block = min(MAX_BLOCK, 1 << max(max_length // 8, 1).bit_length() - 1)
    half = max_length - 1 - max_length // 2 // block * block
    second = half if half > USUAL else max_length - 1
    return (max_length, second) if second > USUAL else (max_length,)


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

    Labels that adapters alone have are not compared. Raises VerificationError for NaN.
    """
    actual = infer({name: reference.feeds[name] for name in graph.token_inputs})
    if any(name.startswith(LORA_HEAD) for name in graph.inputs):
        actual = {name: actual[name][..., : output.shape[-1]] for name, output in reference.outputs.items()}
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


def cause(graph: Graph, module: TaskGraph, rows: Rows, checkpoint: Checkpoint, threads: int) -> str:
    """Return a sentence: which part of the model no graph can represent, or that the cause is a bug."""
    usual = [min(USUAL, checkpoint.max_length)]
    again = first_row_distance(reference(module, rows, usual), reference(module, rows, usual))
    if again > TOLERANCE:
        return f"PyTorch itself answers the same text differently each time, by {again:.1e}: it draws random numbers"
    right, wrong = _equal_up_to(graph, module, rows, checkpoint, threads)
    if right:
        return (
            f"it is PyTorch's graph up to {right} tokens and not at {wrong}: the code of "
            f"{checkpoint.config.model_type} takes another branch for longer texts, and a graph has one. Build it "
            f"with --max-length {right}"
        )
    return BUG


def _equal_up_to(graph: Graph, module: TaskGraph, rows: Rows, checkpoint: Checkpoint, threads: int) -> tuple[int, int]:
    """Return the longest row on which the graph answers as a fresh PyTorch, and the next one; (0, 0) for none.

    Found by halving, with a model loaded anew for each row: one that changes itself must not have answered before.
    """
    task, infer = encoder_task(checkpoint.task), infer_with(graph, threads)

    def equal(length: int) -> bool:
        model, _ = load_model(checkpoint)
        fresh = task.graph(Checkpoint(**{**vars(checkpoint), "model": model}), module.inputs)
        try:
            return error_at(infer, graph, reference(fresh, rows, [length]), task.per_token) <= TOLERANCE
        except (VerificationError, RuntimeError):
            return False

    right, wrong = min(SHORT, checkpoint.max_length), checkpoint.max_length
    if equal(wrong) or not equal(right):
        return 0, 0
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if equal(middle) else (right, middle)
    return right, wrong


def batching_constraint(module: TaskGraph, rows: Rows, max_length: int) -> Alike:
    """Return the property that rows of one call must share: none, their length, or the count of a token id.

    Found by running PyTorch, since no configuration contains it. Padding gets into the answers of models with parts
    that no attention mask reaches (the Fourier transform of FNet, arXiv:2105.03824; the convolutions of ConvBERT,
    arXiv:2008.02496). Heads that pool at the end token, as BART's, take as many of them from each row. Rotary positions
    that are scaled by length (longrope, arXiv:2402.13753) are scaled for all rows by the longest.
    """
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

"""Find why a graph does not answer as PyTorch does, for the error of a failed comparison."""

from __future__ import annotations

from builder.building.verify.batching_constraint import SHORT, first_row_distance
from builder.building.verify.parity import TOLERANCE, USUAL, error_at, reference
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.model import load_model
from builder.checkpoints.tasks.base import TaskGraph, encoder_task
from builder.common.errors import VerificationError
from builder.engines import infer_with
from builder.graphs.export.rows import Rows
from builder.graphs.onnx.graph import Graph

BUG = "this is a bug worth reporting, with the checkpoint's name"


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

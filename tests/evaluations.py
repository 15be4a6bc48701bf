"""Measures of PyTorch's own answers to labelled data."""

from __future__ import annotations

from builder.checkpoints.labelled import Evaluation
from builder.checkpoints.metrics import Scores


def measures_of_pytorch(evaluation: Evaluation) -> Scores:
    labelled = evaluation.data
    scores = labelled.score(labelled.items([evaluation.comparison.reference(sample) for sample in labelled.samples]))
    assert list(scores) == list(labelled.measures)
    return scores

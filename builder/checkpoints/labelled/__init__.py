"""Labelled data of the user: the samples that a task answers, and the score of the answers.

`evaluation_of` infers the kind of the data from its keys.
"""

from builder.checkpoints.labelled.evaluation import Evaluation
from builder.checkpoints.labelled.kinds import evaluation_of

__all__ = ["Evaluation", "evaluation_of"]

"""Judge variants by what they lose of a measure on the user's labelled data, of which --budget allows a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled import Evaluation, evaluation_of
from builder.checkpoints.labelled.evaluation import compact
from builder.checkpoints.labelled.interval import interval_of_draws, scores_of_draws
from builder.checkpoints.metrics import Scores
from builder.checkpoints.tasks.base import Answer, one_pipeline
from builder.checkpoints.tokenizer import truncating
from builder.common.data_folders import data_digest, read_parts
from builder.common.errors import SpecError
from builder.options import BuildSpec
from builder.options.parts import Budget
from builder.repository.report.record import MeasuredVariant

ONE_SPLIT = "give --data the file or folder of one split"


@dataclass(frozen=True)
class Allowance:
    """PyTorch's score of a measure on data, and the share of it that variants keep. `data`: its name, kind and hash."""

    measure: str
    score: float
    share: float
    data: Mapping[str, str]

    @property
    def metric(self) -> str:
        """Name of the number that variants are compared by."""
        return f"share of PyTorch's {self.measure} on {self.data['name']}"

    def __str__(self) -> str:
        least = self.score * self.share
        return f"PyTorch's {self.measure} on {self.data['name']} is {self.score:.4f}: at least {least:.4f} is required"

    def kept(self, measured: MeasuredVariant) -> float:
        """Return the share of PyTorch's score that a variant keeps."""
        return measured.scores[self.measure] / self.score if measured.scores else 0.0


@dataclass(frozen=True)
class LabelledJudge:
    """Measures of variants on labelled data, which nothing was fitted to. `data`: its name, kind and hash.

    Raises SpecError, before anything is answered, for a budget of a measure that the data does not have.
    """

    evaluation: Evaluation
    budget: Budget
    data: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self._measures:
            raise SpecError(
                f"--budget names {self.budget.measure}; {self.data['name']} has {self.data['kind']}, whose measures "
                f"are {', '.join(self.evaluation.data.measures)}"
            )

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        """Requests with which the front answers the data."""
        return [{**sample, "truncate": True} for sample in self.evaluation.data.samples]

    @cached_property
    def _expected(self) -> Sequence[Any]:
        labelled, reference = self.evaluation.data, self.evaluation.comparison.reference
        with one_pipeline():
            return labelled.items([compact(reference(sample)) for sample in labelled.samples])

    @cached_property
    def _drawn(self) -> Sequence[Mapping[str, float]]:
        """PyTorch's scores of draws of the data, with which those of every variant are compared."""
        return scores_of_draws(self.evaluation.data.score, self._expected)

    @cached_property
    def scores(self) -> Scores:
        """PyTorch's scores."""
        return self.evaluation.data.score(self._expected)

    def allowance(self) -> Allowance:
        """Return what the budget allows. Raises SpecError for a score that leaves nothing of it."""
        measure = self._measures[0]
        score, name = self.scores[measure], self.data["name"]
        if not score > 0:
            raise SpecError(f"--budget: PyTorch's {measure} on {name} is {score:.4f}: a variant has nothing to lose")
        share = self.budget.loss if self.budget.is_share else self.budget.loss / score
        if share >= 1:
            raise SpecError(
                f"--budget allows {measure} to lose {self.budget.loss:g}, and PyTorch's on {name} is {score:.4f}: "
                "allow less"
            )
        return Allowance(measure, score, 1 - share, self.data)

    @property
    def _measures(self) -> Sequence[str]:
        """Measures that the budget names, by their whole name or by a word of it, as in "F1 macro"."""
        asked, names = self.budget.measure.lower().replace("_", " "), self.evaluation.data.measures
        return [name for name in names if name.lower() == asked] + [
            name for name in names if asked in name.lower().split()
        ]

    def judged(self, measured: MeasuredVariant, answers: Iterable[Answer]) -> MeasuredVariant:
        """Return `measured` with its scores, by its answers to the requests."""
        labelled = self.evaluation.data
        items = labelled.items([compact(answer) for answer in answers])
        interval = interval_of_draws(self._drawn, scores_of_draws(labelled.score, items))
        return replace(measured, scores=labelled.score(items), interval=interval)


def labelled_judge(spec: BuildSpec, checkpoint: Checkpoint) -> LabelledJudge | None:
    """Return the judge of --budget; None without one.

    Raises SpecError for data that does not fit the task, and for a measure that it does not have.
    """
    budget, path = spec.loss_budget, spec.data
    if budget is None or path is None:
        return None
    cut = replace(checkpoint, tokenizer=truncating(checkpoint.tokenizer, checkpoint.max_length))
    evaluation = evaluation_of(cut, read_parts(path, advice=ONE_SPLIT), None)
    labelled = evaluation.data
    facts = {"name": Path(path).resolve().name, "kind": labelled.kind, "count": labelled.count}
    return LabelledJudge(evaluation, budget, {**facts, "sha256": data_digest(path)})

"""Evaluations of a model on labelled data: evaluations.json, beside the report of the version that is served.

It is not in build.json, which may be signed and describes the build alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from builder.common.errors import RepositoryError
from builder.common.files import write_atomically
from builder.repository.report.record import BuildReport

EVALUATIONS = "evaluations.json"
LOWER_IS_BETTER = ("perplexity", "bits per byte")


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of one evaluation: measures by name, of PyTorch and of the served model."""

    version: int
    """Version of the model that answered."""
    build_key: str | None
    """Its build, since a number can be used again."""
    data: dict[str, str]
    """Name, kind, count and SHA-256 of the data, and its split."""
    pytorch: dict[str, float]
    """Measures of PyTorch's answers."""
    served: dict[str, float]
    """Measures of the served model's answers."""
    metric: str
    """Name of the agreement of both answers."""
    agreement: float
    """Mean agreement of both answers."""
    server: str
    """Server that answered."""
    evaluated: str
    """Day of the evaluation."""
    beyond: str | None = None
    """Why the served model is worse than its build allows; None if it is not."""
    interval: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95% interval of the difference, by measure; empty for a single text or query."""

    def table(self) -> Table:
        """Return a table of the measures side by side."""
        title = f"{self.data['name']}: {self.data['kind']}, {self.data['count']}"
        table = Table(title=title, title_justify="left", caption_justify="left")
        for heading in ("", "PyTorch", "served", "difference", "95% interval"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, value in self.pytorch.items():
            served = self.served[name]
            interval = "" if name not in self.interval else " to ".join(f"{end:+.4f}" for end in self.interval[name])
            table.add_row(name, f"{value:.4f}", f"{served:.4f}", f"{served - value:+.4f}", interval)
        table.caption = "\n".join(
            filter(
                None,
                [
                    f"{self.metric} of the served answers with PyTorch's: {self.agreement:.6f}",
                    f"version {self.version} on {self.server}, {self.evaluated}",
                    self.beyond,
                ],
            )
        )
        return table


def read_evaluations(repository: Path, report: BuildReport) -> list[EvaluationRecord]:
    """Return the evaluations of the version that `report` is of. Raises RepositoryError for a damaged file."""
    records = _records(repository / report.name / EVALUATIONS)
    return [r for r in records if (r.version, r.build_key) == (report.version, report.build_key)]


def add_evaluation(repository: Path, name: str, record: EvaluationRecord) -> None:
    """Write an evaluation of the model `name`, in the place of an earlier one of the same version on the same data."""
    path = repository / name / EVALUATIONS
    records = [other for other in _records(path) if _subject(other) != _subject(record)]
    document = json.dumps([asdict(one) for one in [*records, record]], indent=1, ensure_ascii=False)
    try:
        write_atomically(path, document.encode())
    except OSError as error:
        raise RepositoryError(f"{path} cannot be written ({error.strerror}); the evaluation is not in it") from error


def _records(path: Path) -> Sequence[EvaluationRecord]:
    try:
        documents: Any = json.loads(path.read_text("utf-8")) if path.is_file() else []
        return [EvaluationRecord(**document) for document in documents]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RepositoryError(f"{path} is not a list of evaluations ({error}); remove it") from error


def _subject(record: EvaluationRecord) -> tuple[object, ...]:
    return record.version, record.build_key, record.data["sha256"], record.data["count"]

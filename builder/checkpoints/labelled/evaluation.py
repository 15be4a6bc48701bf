"""Hold the samples to answer and the score of the answers, whatever the data looked like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder.checkpoints.metrics import Scores
from builder.checkpoints.rankers import Ranker, Ranking
from builder.common.errors import SpecError

Sample = Mapping[str, Any]
Answer = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Samples of a task, and the measures of answers to them by their labels, the most important first.

    `kind`: of the data, as tables name it. `count`: what was evaluated, such as "50 queries". `note`: what was left
    out; "" for nothing.
    """

    kind: str
    count: str
    samples: Sequence[Sample]
    score: Callable[[Sequence[Answer]], Scores]
    note: str = ""


def ranking_evaluation(
    kind: str,
    count: str,
    ranker: Ranker,
    ranking: Ranking,
    score: Callable[[Sequence[Sequence[float]]], Scores],
    note: str = "",
) -> Evaluation:
    """Return the evaluation of a ranking; `score`: of the scores of each query's candidates."""
    return Evaluation(
        kind,
        count,
        ranker.samples(ranking),
        lambda answers: score([scores.tolist() for scores in ranker.scores(ranking, answers)]),
        note,
    )


def text_of(row: Row, key: str) -> str:
    """Return a text of a row. Raises SpecError for another value."""
    if not isinstance(row[key], str):
        raise SpecError(f"{key} is {str(row[key])[:80]!r}; expected a text")
    return str(row[key])


def texts_of(value: Any, key: str) -> list[str]:
    """Return a text or a list of texts as a list, without empty ones. Raises SpecError for another value."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"{key} is {str(value)[:80]!r}; expected a text or a list of texts")
    return [text for text in texts if text.strip()]


def without(rows: int, what: str) -> str:
    """Return the note on rows that were left out; "" for none."""
    return f"left out: {rows} {what}" if rows else ""

"""Hold the samples to answer and the score of the answers, whatever the data looked like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.checkpoints.metrics import Scores
from builder.checkpoints.rankers import Ranker, Ranking
from builder.common.errors import SpecError

Sample = Mapping[str, Any]
Answer = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class LabelledData:
    """Samples of a task, and the measures of answers to them by their labels, the most important first.

    `kind`: of the data, as tables name it. `count`: what was evaluated, such as "50 queries". `items`: what the
    measures need of all answers, one item for each text, query or question. `score`: the measures of such items, by the
    names in `measures`. `note`: what was left out; "" for nothing.
    """

    kind: str
    count: str
    samples: Sequence[Sample]
    items: Callable[[Sequence[Answer]], Sequence[Any]]
    score: Callable[[Sequence[Any]], Scores]
    measures: Sequence[str]
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """PyTorch's answers, and how much an answer agrees with one: 1 is equal, as `metric` measures it."""

    reference: Callable[[Sample], Answer]
    agreement: Callable[[Answer, Answer], float]
    metric: str


@dataclass(frozen=True)
class Evaluation:
    """Labelled data, and what the answers to it are compared with."""

    data: LabelledData
    comparison: Comparison


def ranking_data(
    kind: str,
    count: str,
    ranker: Ranker,
    ranking: Ranking,
    labels: Sequence[Any],
    score: Callable[[Sequence[Any], Sequence[Any]], Scores],
    measures: Sequence[str],
    note: str = "",
    found: Callable[[np.ndarray], Any] = np.ndarray.tolist,
) -> LabelledData:
    """Return the data of a ranking; `labels`: one for each query.

    `score`: the measures by the labels of queries and what was `found` by the scores of the candidates of each.
    """

    def items(answers: Sequence[Answer]) -> Sequence[Any]:
        return list(zip(labels, map(found, ranker.scores(ranking, answers)), strict=True))

    return LabelledData(
        kind, count, ranker.samples(ranking), items, lambda items: score(*zip(*items, strict=True)), measures, note
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


def compact(answer: Mapping[str, Any]) -> Answer:
    """Return an answer with lists of fractions as arrays, which take a tenth of the memory."""
    return {key: np.asarray(value, np.float32) if _is_fractions(value) else value for key, value in answer.items()}


def _is_fractions(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, float)

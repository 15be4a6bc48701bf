"""The emitted Python, run in this process over a graph, against what transformers answers to the same samples.

What is compared is what Triton will serve: the same files, with a session where the server has a BLS call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.engines import Infer
from builder.errors import VerificationError
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import Field
from builder.tasks.base import Answer, EncoderTask, Sample
from builder.tensors import to_tensors, to_values


@dataclass(frozen=True)
class Quality:
    """Agreement with the reference over the samples, and what sharing a batch does to an answer."""

    mean: float
    worst: float
    error: float  # largest difference of a number; infinite where a label or text differs
    where: str
    batch_agreement: float  # mean agreement of an answer in a batch with the answer alone
    padding: float  # share of the engine's tokens that were padding, all samples in one batch
    scores: Mapping[str, float]  # the task's own measures, where samples have labels


def served_quality(
    infer: Infer,
    front: Path,
    task: EncoderTask,
    fields: tuple[Sequence[Field], Sequence[Field]],
    samples: Sequence[Sample],
    expected: Sequence[Answer],
    score: Callable[[Sequence[Answer]], Mapping[str, float]],
) -> Quality:
    """Answer `samples` one by one, all at once and all at once in reverse, and compare with `expected`.

    `infer`: the engine's, opened. `score`: of answers to all samples, by their labels.
    """
    pipeline = Pipeline(front, infer)
    requests = [to_tensors(sample, fields[0]) for sample in samples]
    alone = [_answers(pipeline, [request], fields[1])[0] for request in requests]
    before = (pipeline.counts.tokens, pipeline.counts.padded_tokens)
    together = _answers(pipeline, requests, fields[1])
    tokens, padded = pipeline.counts.tokens - before[0], pipeline.counts.padded_tokens - before[1]
    reversed_order = _answers(pipeline, requests[::-1], fields[1])[::-1]
    agreements = [task.agreement(e, a) for e, a in zip(expected, together, strict=True)]
    differences = [task.difference(e, a) for e, a in zip(expected, together, strict=True)]
    error, where = max(differences)
    mates = [task.agreement(a, b) for batch in (together, reversed_order) for a, b in zip(alone, batch, strict=True)]
    return Quality(
        mean=float(np.mean(agreements)),
        worst=float(np.min(agreements)),
        error=error,
        where=where,
        batch_agreement=float(np.mean(mates)),
        padding=1 - tokens / max(padded, 1),
        scores=score(together),
    )


def _answers(pipeline: Pipeline, requests: Sequence[Any], fields: Sequence[Field]) -> list[Answer]:
    answers: list[Answer] = []
    for index, answer in enumerate(pipeline(requests)):
        if isinstance(answer, Exception):
            raise VerificationError(f"sample {index + 1} fails in the emitted code: {answer!r}") from answer
        answers.append(to_values(answer, fields)[0])
    return answers

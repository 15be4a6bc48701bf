"""The emitted Python, run in this process over a graph, against transformers' answers to the same samples.

The build compares what Triton will serve: the same files, with a session where the server has a BLS call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample
from builder.common.errors import SpecError, VerificationError
from builder.common.tensors import to_tensors, to_values
from builder.engines import Infer
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import Field, InputError

SERVED_TOLERANCE = 1e-3  # fp32 answers against the pipeline's, whose own batches differ in the last digits
ALONE_EVERY = 4  # one of so many samples is also run alone


@dataclass(frozen=True)
class Quality:
    """Agreement with the reference over the samples, and the effect of sharing a batch on an answer."""

    mean: float
    worst: float
    error: float  # largest difference of a number; infinite where a label or text differs
    where: str
    ranking: Mapping[str, float]  # how alike the samples are ranked, by measure, if the task's answers rank
    batch_agreement: float  # mean agreement of an answer in a batch with the answer alone
    padding: float  # share of the engine's tokens that were padding, all samples in one batch
    scores: Mapping[str, float]  # the task's own measures, where samples have labels
    samples: int | None = None  # that decided alone: only mean, worst, error and where are measured then


def served_quality(
    infer: Infer,
    front: Path,
    task: EncoderTask,
    fields: tuple[Sequence[Field], Sequence[Field]],
    samples: Sequence[Sample],
    expected: Sequence[Answer],
    score: Callable[[Sequence[Answer]], Mapping[str, float]],
    min_mean: float | None,
) -> Quality:
    """Answer one of each `ALONE_EVERY` samples alone, then all at once, in a random order; compare the answers.

    All answers are compared with `expected`, and those alone with those of the batch.

    `infer`: the engine's, opened. `score`: of answers to all samples, by their labels. `min_mean`: the mean agreement
    that is required; the batch is left out where equal answers to it could not reach that any more.
    """
    pipeline = Pipeline(front, infer)
    requests = [to_tensors(sample, fields[0]) for sample in samples]
    alone = {
        place: answers_of(pipeline, requests, [place], fields[1])[0] for place in range(0, len(samples), ALONE_EVERY)
    }
    pairs = [(expected[place], answer) for place, answer in alone.items()]
    agreements = [task.agreement(e, a) for e, a in pairs]
    differences = [task.difference(e, a) for e, a in pairs]
    if min_mean is not None and (sum(agreements) + len(samples)) / (len(agreements) + len(samples)) < min_mean:
        error, where = max(differences)
        mean, worst = float(np.mean(agreements)), float(np.min(agreements))
        return Quality(mean, worst, error, where, {}, 0.0, 0.0, {}, samples=len(alone))
    before = replace(pipeline.counts)
    mixed = np.random.default_rng(0).permutation(len(samples)).tolist()
    answered = dict(zip(mixed, answers_of(pipeline, requests, mixed, fields[1]), strict=True))
    together = [answered[place] for place in range(len(samples))]
    tokens, padded = pipeline.counts.tokens - before.tokens, pipeline.counts.padded_tokens - before.padded_tokens
    agreements += [task.agreement(e, a) for e, a in zip(expected, together, strict=True)]
    differences += [task.difference(e, a) for e, a in zip(expected, together, strict=True)]
    error, where = max(differences)
    batched = [task.agreement(answer, together[place]) for place, answer in alone.items()]
    return Quality(
        mean=float(np.mean(agreements)),
        worst=float(np.min(agreements)),
        error=error,
        where=where,
        ranking=task.ranking(expected, together),
        batch_agreement=float(np.mean(batched)),
        padding=1 - tokens / max(padded, 1),
        scores=score(together),
    )


def answers_of(
    pipeline: Pipeline,
    requests: Sequence[Any] | Mapping[int, Any],
    places: Sequence[int],
    fields: Sequence[Field],
    name: str = "sample",
) -> list[Answer]:
    """Return the answers to the requests at `places`, sent as one batch in that order. `name`: of one of them.

    Raises SpecError for one that the model refuses, VerificationError for one that fails.
    """
    answers: list[Answer] = []
    for place, answer in zip(places, pipeline([requests[place] for place in places]), strict=True):
        if isinstance(answer, InputError):
            raise SpecError(f"{name} {place + 1} is refused by the model itself: {answer}") from answer
        if isinstance(answer, Exception):
            raise VerificationError(f"{name} {place + 1} fails in the emitted code: {answer!r}") from answer
        answers.append(to_values(answer, fields)[0])
    return answers

"""Ask PyTorch and the served model the same samples, and score both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import numpy as np

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled import Evaluation
from builder.checkpoints.tasks.base import Answer, Sample, encoder_task, one_pipeline
from builder.common.errors import ServeError
from builder.repository.report.evaluations import EvaluationRecord
from builder.repository.report.record import BuildReport
from builder.serving.client.client import Client

IN_FLIGHT = 16  # requests, which the model's own queue batches
Progress = Callable[[Iterable[Answer], str], Iterable[Answer]]  # shows how many of the answers have come


def evaluate(
    client: Client,
    report: BuildReport,
    checkpoint: Checkpoint,
    evaluation: Evaluation,
    data: Mapping[str, str],
    progress: Progress = lambda answers, side: answers,
) -> EvaluationRecord:
    """Return the measures of both. `data`: name and hash of the data.

    Raises ServeError for a sample that the served model refuses.
    """
    samples = evaluation.samples
    served = list(progress(_served(client, samples), "served model"))
    with one_pipeline():
        task = encoder_task(checkpoint.task)
        expected = list(progress((_compact(task.reference(checkpoint, sample)) for sample in samples), "PyTorch"))
    scores = {"pytorch": evaluation.score(expected), "served": evaluation.score(served)}
    agreement = float(np.mean([task.agreement(a, b) for a, b in zip(expected, served, strict=True)]))
    return EvaluationRecord(
        version=report.version,
        build_key=report.build_key,
        data={**data, "kind": evaluation.kind, "count": evaluation.count},
        **scores,
        metric=report.metric,
        agreement=agreement,
        server=client.server(),
        evaluated=datetime.now(UTC).date().isoformat(),
        beyond=beyond_gate(report, scores["pytorch"], scores["served"], agreement),
    )


def refuse_another_task(client: Client, report: BuildReport) -> None:
    """Raise ServeError if the server has another model under the name."""
    task = client.signature.parameters.get("task")
    if task != report.task:
        raise ServeError(
            f"{report.name} is for {report.task} in the repository, and at {client.url} for {task or 'no known task'}; "
            "name the server of this repository with --url"
        )


def beyond_gate(
    report: BuildReport, pytorch: Mapping[str, float], served: Mapping[str, float], agreement: float
) -> str | None:
    """Return why the served model is worse than the gate of its build allows; None if it is not.

    As in a build, the gate is the share of PyTorch's first score that is kept; and the agreement with PyTorch, unless
    the build had labels.
    """
    name, score = next(iter(pytorch.items()))
    least = report.threshold
    if score - served[name] > (1 - least) * abs(score) + 1e-9:
        return f"WORSE than the build allows: {name} is {served[name]:.4f}, at least {least:g} of {score:.4f} is right"
    if report.gate in (None, report.metric) and agreement < least:
        return f"WORSE than the build allows: {report.metric} is {agreement:.4f}, at least {least:g} is right"
    return None


def _served(client: Client, samples: Sequence[Sample]) -> Iterator[Answer]:
    """Yield the answers of the server in the order of the samples, with several requests in flight."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        running = [pool.submit(client.ask, {**sample, "truncate": True}) for sample in samples]
        try:
            for number, answer in enumerate(running, 1):
                try:
                    yield _compact(answer.result())
                except ServeError as error:
                    raise ServeError(f"sample {number} of {len(samples)}: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _compact(answer: Mapping[str, Any]) -> Answer:
    """Return an answer with lists of fractions as arrays, which take a tenth of the memory."""
    return {key: np.asarray(value, np.float32) if _is_fractions(value) else value for key, value in answer.items()}


def _is_fractions(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, float)

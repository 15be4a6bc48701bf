"""Ask PyTorch and the served model the same samples, and score both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import numpy as np

from builder.checkpoints.labelled import Evaluation
from builder.checkpoints.labelled.evaluation import compact
from builder.checkpoints.labelled.interval import difference_interval
from builder.checkpoints.tasks.base import Answer, Sample, one_pipeline
from builder.common.errors import ServeError
from builder.repository.report.evaluations import LOWER_IS_BETTER, EvaluationRecord
from builder.repository.report.record import BuildReport
from builder.serving.client.client import Client

IN_FLIGHT = 16  # requests, which the model's own queue batches
ROWS = 16  # of one request
TEXTS = ("text_input", "text_pair", "query", "documents", "question", "context")  # other inputs are a request's options
Progress = Callable[[Iterable[Answer], str], Iterable[Answer]]  # shows how many of the answers have come


def evaluate(
    client: Client,
    report: BuildReport,
    evaluation: Evaluation,
    data: Mapping[str, str],
    progress: Progress = lambda answers, side: answers,
) -> EvaluationRecord:
    """Return the measures of both. `data`: name and hash of the data.

    Raises ServeError for a sample that the served model refuses.
    """
    asked, comparison = evaluation.data, evaluation.comparison
    served = list(progress(_served(client, asked.samples), "served model"))
    with one_pipeline():
        answers = (compact(comparison.reference(sample)) for sample in asked.samples)
        expected = list(progress(answers, "PyTorch"))
    items = {"pytorch": asked.items(expected), "served": asked.items(served)}
    scores = {side: asked.score(own) for side, own in items.items()}
    agreement = float(np.mean([comparison.agreement(a, b) for a, b in zip(expected, served, strict=True)]))
    return EvaluationRecord(
        version=report.version,
        build_key=report.build_key,
        data={**data, "kind": asked.kind, "count": asked.count},
        **scores,
        metric=comparison.metric,
        agreement=agreement,
        server=client.server(),
        evaluated=datetime.now(UTC).date().isoformat(),
        beyond=beyond_gate(report, scores["pytorch"], scores["served"], agreement, comparison.metric),
        interval=difference_interval(asked.score, items["pytorch"], items["served"]),
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
    report: BuildReport, pytorch: Mapping[str, float], served: Mapping[str, float], agreement: float, metric: str
) -> str | None:
    """Return why the served model is worse than the gate of its build allows; None if it is not.

    As in a build, the gate is the share of PyTorch's first score that is kept; and the agreement with PyTorch, if
    `metric` is that of the build, unless the build had labels.
    """
    name, score = next(iter(pytorch.items()))
    least = report.threshold
    loss = served[name] - score if name in LOWER_IS_BETTER else score - served[name]
    if not (loss <= (1 - least) * abs(score) + 1e-9 or math.isnan(score)):  # worse, or not a number
        return (
            f"WORSE than the build allows: {name} is {served[name]:.4f}, within {1 - least:g} of {score:.4f} is right"
        )
    if report.gate in (None, report.metric) and metric == report.metric and agreement < least:
        return f"WORSE than the build allows: {report.metric} is {agreement:.4f}, at least {least:g} is right"
    return None


def _served(client: Client, samples: Sequence[Sample]) -> Iterator[Answer]:
    """Yield the answers of the server in the order of the samples, with several requests in flight."""
    signature = client.signature
    requests: list[Sequence[Sample]]
    ask: Callable[[Sequence[Sample]], list[dict[str, Any]]]
    if signature.streams:
        requests, ask = [[sample] for sample in samples], lambda request: [client.ask(request[0])]
    else:
        cut = [{**sample, "truncate": True} for sample in samples]
        requests, ask = list(requests_of(cut, signature.max_batch_size)), client.ask_rows
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        running = [pool.submit(ask, request) for request in requests]
        number = 0
        try:
            for request, answers in zip(requests, running, strict=True):
                for answer in _answers(client, request, answers, f"of {len(samples)}", number):
                    yield compact(answer)
                number += len(request)
        finally:
            pool.shutdown(cancel_futures=True)


def _answers(
    client: Client, request: Sequence[Sample], answers: Future[list[dict[str, Any]]], total: str, before: int
) -> list[dict[str, Any]]:
    """Return the answers to a request. Raises ServeError with the number of the sample that is refused."""
    try:
        return answers.result()
    except ServeError:
        found = []
        for number, sample in enumerate(request, before + 1):
            try:
                found.append(client.ask(sample))
            except ServeError as error:
                raise ServeError(f"sample {number} {total}: {error}") from error
        return found


def requests_of(samples: Sequence[Sample], max_batch_size: int) -> Iterator[Sequence[Sample]]:
    """Yield the samples as rows of requests, in their order: rows share the sizes of their texts and all options."""
    most = max(1, min(max_batch_size, ROWS))
    for _, alike in itertools.groupby(samples, _shared):
        rows = list(alike)
        yield from (rows[start : start + most] for start in range(0, len(rows), most))


def _shared(sample: Sample) -> list[tuple[str, Any]]:
    """Return what rows of one request must share with `sample`."""
    return [
        (name, value if name not in TEXTS else len(value) if isinstance(value, list) else 0)
        for name, value in sample.items()
    ]

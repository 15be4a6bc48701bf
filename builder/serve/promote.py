"""Trying a version beside the one that answers, on the same server, before it takes its place.

The candidate is loaded under a name of its own, of links to its files, so that no client of the model is answered by
it. Both answer the samples, by turns. Knows answers and times; what agreement is, is the task's.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from builder.errors import ServeError
from builder.serve.client import Client
from builder.serve.control import Control
from builder.triton.transaction import changing
from builder.triton.versions import CONFIG, entries, with_name

ROUNDS = 3  # of all samples, by turns

Agreement = Callable[[Mapping[str, Any], Mapping[str, Any]], float]


@dataclass
class Side:
    """What came of one version: an answer and its milliseconds a request, or an error."""

    number: int
    ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ask(self, client: Client, sample: Mapping[str, Any]) -> dict[str, Any] | None:
        begun = time.perf_counter()
        try:
            answer = client.ask(sample)
        except ServeError as error:
            self.errors.append(str(error))
            return None
        self.ms.append(1000 * (time.perf_counter() - begun))
        return answer

    def quantile(self, share: float) -> float:
        """Milliseconds within which that share of the requests was answered."""
        return sorted(self.ms)[int(share * (len(self.ms) - 1))] if self.ms else float("nan")


@dataclass(frozen=True)
class Trial:
    """Two versions on the same requests. `agreements`: of the candidate's answers with those of the running one."""

    running: Side
    candidate: Side
    agreements: Sequence[float]

    def refusals(self, agreement: float, slower: float) -> list[str]:
        """Why the candidate must not take the place: it fails, answers otherwise, or takes longer than allowed."""
        found = []
        if self.candidate.errors:
            found.append(f"{len(self.candidate.errors)} requests failed: {self.candidate.errors[0]}")
        if self.agreements and statistics.fmean(self.agreements) < agreement:
            found.append(
                f"its answers agree by {statistics.fmean(self.agreements):.4f}; at least {agreement} is asked for"
            )
        medians = [side.quantile(0.5) for side in (self.running, self.candidate)]
        if medians[1] > slower * medians[0]:
            found.append(f"it takes {medians[1] / medians[0]:.2f} times as long; at most {slower} is allowed")
        return found

    def table(self, name: str) -> Table:
        table = Table(title=f"{name}: what answers, and what is to take its place", title_justify="left")
        for column in ("version", "answers", "errors", "agreement", "worst", "p50 ms", "p90 ms", "p99 ms"):
            table.add_column(column, justify="right")
        agreed = [f"{statistics.fmean(self.agreements):.4f}", f"{min(self.agreements):.4f}"] if self.agreements else []
        for side, shown in ((self.running, ["-", "-"]), (self.candidate, agreed or ["-", "-"])):
            quantiles = [f"{side.quantile(share):.1f}" for share in (0.5, 0.9, 0.99)]
            table.add_row(str(side.number), str(len(side.ms)), str(len(side.errors)), *shown, *quantiles)
        return table


@contextmanager
def beside(control: Control, name: str, number: int, running: int) -> Iterator[str]:
    """Version `number` of `name`, loaded under another name, which is given; gone from server and repository after.

    Raises ServeError where the server does not load it.
    """
    candidate = f"{name}-candidate"
    repository = control.repository
    _, *engines = entries(repository, name, number)
    with changing(repository) as change:
        made = change.staging / candidate
        shutil.copytree(repository / name / str(number), made / str(number), copy_function=os.link)
        (made / CONFIG).write_bytes(with_name((made / str(number) / CONFIG).read_bytes(), candidate))
        change.move(made, repository / candidate)
        try:
            others = {engine: control.add(engine, number, [running]) for engine in engines}
            control.load(candidate)
            try:
                yield candidate
            finally:
                control.unload(candidate)
                for engine, before in others.items():
                    control.only(engine, before or {number})
        finally:
            change.undo()


def try_beside(
    control: Control,
    name: str,
    numbers: tuple[int, int],
    samples: Callable[[Client], Sequence[Mapping[str, Any]]],
    agreement: Agreement,
) -> Trial:
    """Ask the running version and the candidate the same; `numbers`: of the two. Raises ServeError."""
    sides = Side(numbers[0]), Side(numbers[1])
    agreements = []
    with (
        beside(control, name, numbers[1], numbers[0]) as candidate,
        Client(control.url, name) as one,
        Client(control.url, candidate) as other,
    ):
        asked = samples(one)
        for sample in asked:  # it is warm then
            Side(numbers[1]).ask(other, sample)
        for turn in range(ROUNDS * len(asked)):
            sample = asked[turn % len(asked)]
            order = (0, 1) if turn % 2 else (1, 0)
            found = {side: sides[side].ask((one, other)[side], sample) for side in order}
            expected, actual = found[0], found[1]
            if expected is not None and actual is not None:
                agreements.append(agreement(expected, actual))
    return Trial(*sides, agreements)


def same_text(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> float:
    """Whether two models wrote the same."""
    return float(expected["text_output"] == actual["text_output"])

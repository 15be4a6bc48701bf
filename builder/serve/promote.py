"""Trying a version beside the one that answers, on the same server, before it takes its place.

The candidate is loaded under a name of its own, of links to its files, so that no client of the model is answered by
it. Both answer the samples, by turns. Nobody changes the model meanwhile; others of the repository may be changed.
Knows answers and times; what agreement is, is the task's.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from builder.errors import ServeError
from builder.serve.client import Client
from builder.serve.control import Control
from builder.triton.transaction import alone, visiting
from builder.triton.versions import CONFIG, as_candidate, entries

ROUNDS = 3  # of all samples, by turns
GREEDY = {"temperature": 0.0, "num_beams": 1, "n": 1, "logprobs": 0}  # with logprobs, an answer names its tokens
OF_BEAMS = ("length_penalty", "early_stopping")


@dataclass(frozen=True)
class Match:
    """How far two answers to one request agree: `agreed` of `parts`, each of which counts the same."""

    agreed: float
    parts: float = 1.0


Agreement = Callable[[Mapping[str, Any], Mapping[str, Any]], Match]


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
    agreements: Sequence[Match]

    @property
    def agreement(self) -> float:
        """The share of all parts."""
        return sum(match.agreed for match in self.agreements) / sum(match.parts for match in self.agreements)

    def refusals(self, agreement: float, slower: float) -> list[str]:
        """Why the candidate must not take the place: it fails, answers otherwise, or takes longer than allowed."""
        reasons = []
        if self.candidate.errors:
            reasons.append(f"{len(self.candidate.errors)} requests failed: {self.candidate.errors[0]}")
        elif not self.agreements:
            reasons.append(
                f"no request was answered by both, so nothing is known of its answers{_first(self.running.errors)}; "
                "build-repo rollback NAME VERSION changes versions without a trial"
            )
        if self.agreements and self.agreement < agreement:
            reasons.append(f"its answers agree by {self.agreement:.4f}; at least {agreement} is asked for")
        medians = [side.quantile(0.5) for side in (self.running, self.candidate)]
        if medians[1] > slower * medians[0]:
            reasons.append(f"it takes {medians[1] / medians[0]:.2f} times as long; at most {slower} is allowed")
        return reasons

    def table(self, name: str) -> Table:
        table = Table(title=f"{name}: what answers, and what is to take its place", title_justify="left")
        for column in ("version", "answers", "errors", "agreement", "worst", "p50 ms", "p90 ms", "p99 ms"):
            table.add_column(column, justify="right")
        worst = min((match.agreed / match.parts for match in self.agreements), default=0.0)
        agreed = [f"{self.agreement:.4f}", f"{worst:.4f}"] if self.agreements else []
        for side, shown in ((self.running, ["-", "-"]), (self.candidate, agreed or ["-", "-"])):
            quantiles = [f"{side.quantile(share):.1f}" for share in (0.5, 0.9, 0.99)]
            table.add_row(str(side.number), str(len(side.ms)), str(len(side.errors)), *shown, *quantiles)
        return table


def _first(errors: Sequence[str]) -> str:
    return f" (the running version: {errors[0]})" if errors else ""


@contextmanager
def beside(control: Control, name: str, number: int, running: int) -> Iterator[str]:
    """Version `number` of `name`, loaded under another name, which is given; gone from server and repository after.

    Raises ServeError where the server does not load it.
    """
    candidate = f"{name}-candidate"
    repository = control.repository

    def make(entry: Path) -> None:
        shutil.copytree(repository / name / str(number), entry / str(number), copy_function=os.link)
        (entry / CONFIG).write_bytes(as_candidate((entry / str(number) / CONFIG).read_bytes(), candidate, name))

    with alone(repository, name), visiting(repository, candidate, make):
        _, *engines = entries(repository, name, number)
        others = {engine: control.add(engine, number, [running]) for engine in engines}
        try:
            control.load(candidate)
            try:
                yield candidate
            finally:
                control.unload(candidate)
        finally:
            for engine, before in others.items():
                control.only(engine, before or {number})


def compare(
    url: str,
    names: tuple[str, str],
    numbers: tuple[int, int],
    samples: Callable[[Client], Sequence[Mapping[str, Any]]],
    agreement: Agreement,
) -> Trial:
    """Ask the running version and the candidate the same. `names`, `numbers`: of the two. Raises ServeError."""
    sides = Side(numbers[0]), Side(numbers[1])
    agreements = []
    with Client(url, names[0]) as one, Client(url, names[1]) as other:
        requests = [greedy(sample, one) for sample in samples(one)]
        for sample in requests:  # it is warm then
            Side(numbers[1]).ask(other, sample)
        for turn in range(ROUNDS * len(requests)):
            sample = requests[turn % len(requests)]
            order = (0, 1) if turn % 2 else (1, 0)
            answers = {side: sides[side].ask((one, other)[side], sample) for side in order}
            expected, actual = answers[0], answers[1]
            if expected is not None and actual is not None:
                agreements.append(agreement(expected, actual))
    return Trial(*sides, agreements)


def greedy(sample: Mapping[str, Any], client: Client) -> dict[str, Any]:
    """The request without chance or search, where the model has these options: then its answers can be compared."""
    inputs = {field.name for field in client.signature.inputs}
    if not set(GREEDY) <= inputs:
        return dict(sample)
    return {**{name: value for name, value in sample.items() if name not in OF_BEAMS}, **GREEDY}


def same_tokens(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Match:
    """The next tokens of two greedy answers, up to the first that is another: until there both had read the same.

    What comes after says nothing, for it follows another text. So the share is that of a next-token agreement. Where
    answers do not name their tokens, it is whether their texts are the same.
    """
    if "logprobs_output" not in expected or "logprobs_output" not in actual:
        return Match(float(expected["text_output"] == actual["text_output"]))
    one, other = (_tokens(answer) for answer in (expected, actual))
    if not one and not other:
        return Match(1.0)  # both end at once
    same = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        same = min(len(one), len(other))
    return Match(same, max(1, same + (same < max(len(one), len(other)))))


def _tokens(answer: Mapping[str, Any]) -> list[int]:
    (logprobs,) = answer["logprobs_output"]
    return [token["token"] for token in json.loads(logprobs)]

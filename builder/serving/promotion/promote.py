"""Try a version beside the running one, on the same server, before it replaces that version.

The candidate is a set of links to its files under another name, so clients of the model never get its answers. Both
versions answer the samples in turn. A lock keeps the model unchanged meanwhile; other models of the repository may
change. Knows answers and times; the task defines agreement.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from builder.checkpoints.distances import PairedNumbers, relative_distance
from builder.common.errors import ServeError
from builder.common.progress import OnProgress
from builder.repository.config.render import CONFIG
from builder.repository.locks import locked
from builder.repository.transaction import visiting
from builder.repository.versions import as_candidate, entry_names
from builder.serving.client.client import Client
from builder.serving.server.control import Control

ROUNDS = 3  # repetitions of all samples
CANDIDATE_DRAIN_S = 60.0  # for the last request of a candidate
REQUEST_ID = re.compile(r"\[request id: [^\]]*\] ")  # in Triton's errors
GREEDY = {"temperature": 0.0, "num_beams": 1, "n": 1, "logprobs": 0}  # with logprobs, an answer names its tokens
OF_BEAMS = ("length_penalty", "early_stopping")


@dataclass(frozen=True)
class OutputMatch:
    """Agreement of two answers to one request: `agreed` of `parts`, which count equally, and their `numbers`."""

    agreed: float
    parts: float = 1.0
    numbers: Mapping[str, PairedNumbers] = field(default_factory=dict)


@dataclass(frozen=True)
class PromotionLimits:
    """Limits of a candidate: least `agreement`, `tolerance` of its scores, and at most `slower` times the time."""

    agreement: float
    tolerance: float
    slower: float


Agreement = Callable[[Mapping[str, Any], Mapping[str, Any]], OutputMatch]


@dataclass
class TriedVersion:
    """Results of one version: the milliseconds of each answer, and the errors."""

    number: int
    ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ask(self, client: Client, sample: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the answer, or the error."""
        started = time.perf_counter()
        try:
            answer = client.ask(sample)
        except ServeError as error:
            return REQUEST_ID.sub("", str(error))
        self.ms.append(1000 * (time.perf_counter() - started))
        return answer

    def quantile(self, share: float) -> float:
        """Return the milliseconds within which this share of the requests was answered."""
        return sorted(self.ms)[int(share * (len(self.ms) - 1))] if self.ms else float("nan")


@dataclass(frozen=True)
class PromotionTrial:
    """Two versions on the same requests. `agreements`: of the candidate's answers with those of the running version.

    `shared`: errors that both versions gave to the same request, which count for neither.
    """

    running: TriedVersion
    candidate: TriedVersion
    agreements: Sequence[OutputMatch]
    shared: Sequence[str] = ()

    @property
    def agreement(self) -> float:
        """Share of all parts that agree."""
        return sum(match.agreed for match in self.agreements) / sum(match.parts for match in self.agreements)

    @property
    def apart(self) -> tuple[float, str] | None:
        """Return the distance of the scores and its output; None for answers without scores."""
        scored = [match.numbers for match in self.agreements if match.numbers]
        return relative_distance(scored) if scored else None

    def refusals(self, limits: PromotionLimits) -> list[str]:
        """Return the reasons against the candidate: it fails, answers differently, or takes longer than allowed."""
        reasons = []
        if self.candidate.errors:
            reasons.append(f"{len(self.candidate.errors)} requests failed: {self.candidate.errors[0]}")
        elif not self.agreements:
            reasons.append(
                f"no request was answered by both, so nothing was compared{_first(self.running.errors, self.shared)}; "
                "give requests that they answer with --samples FILE. build-repo rollback NAME VERSION changes versions "
                "without a trial"
            )
        if self.agreements and self.agreement < limits.agreement:
            reasons.append(
                f"its answers agree by {self.agreement:.4f}; at least {limits.agreement} is asked for. If it is to "
                "answer otherwise, lower --agreement"
            )
        if self.apart is not None and self.apart[0] > limits.tolerance:
            reasons.append(
                f"its scores are {self.apart[0]:.2f} apart, most in {self.apart[1]}; at most {limits.tolerance:g} is "
                "allowed (0: equal, 1: unrelated). If it is to answer otherwise, raise --tolerance"
            )
        medians = [side.quantile(0.5) for side in (self.running, self.candidate)]
        if medians[1] > limits.slower * medians[0]:
            reasons.append(f"it takes {medians[1] / medians[0]:.2f} times as long; at most {limits.slower} is allowed")
        return reasons

    def table(self, name: str, limits: PromotionLimits) -> Table:
        table = Table(
            title=f"{name}: what answers, and what is to take its place",
            title_justify="left",
            caption=f"accepted: agreement from {limits.agreement:g}, scores up to {limits.tolerance:g} apart, up to "
            f"{limits.slower:g} times the median time; {len(self.shared)} requests failed alike in both",
            caption_justify="left",
        )
        for column in ("version", "answers", "errors", "agreement", "worst", "apart", "p50 ms", "p90 ms", "p99 ms"):
            table.add_column(column, justify="right")
        worst = min((match.agreed / match.parts for match in self.agreements), default=0.0)
        agreed = [f"{self.agreement:.4f}", f"{worst:.4f}"] if self.agreements else ["-", "-"]
        agreed.append("-" if self.apart is None else f"{self.apart[0]:.4f}")
        for side, shown in ((self.running, ["-"] * 3), (self.candidate, agreed)):
            quantiles = [f"{side.quantile(share):.1f}" for share in (0.5, 0.9, 0.99)]
            table.add_row(str(side.number), str(len(side.ms)), str(len(side.errors)), *shown, *quantiles)
        return table


def _first(errors: Sequence[str], shared: Sequence[str]) -> str:
    if errors:
        return f" (the running version: {errors[0]})"
    return f" (both versions: {shared[0]})" if shared else ""


@contextmanager
def beside(controls: Sequence[Control], name: str, number: int, running: int) -> Iterator[str]:
    """Load version `number` of `name` on servers of one repository under another name, which is yielded.

    Removes it afterwards. Raises ServeError if a server does not load it.
    """
    candidate = f"{name}-candidate"
    repository = controls[0].repository

    def make(entry: Path) -> None:
        shutil.copytree(repository / name / str(number), entry / str(number), copy_function=os.link)
        (entry / CONFIG).write_bytes(as_candidate((entry / str(number) / CONFIG).read_bytes(), candidate, name))

    with locked(repository, name), visiting(repository, candidate, make), ExitStack() as stack:
        _, *engines = entry_names(repository, name, number)
        for control in controls:
            stack.enter_context(_loaded(control, candidate, engines, number, running))
        yield candidate


@contextmanager
def _loaded(control: Control, candidate: str, engines: Sequence[str], number: int, running: int) -> Iterator[None]:
    """Have a server load a candidate and version `number` of its engines; unload them afterwards."""
    others = {engine: control.add(engine, number, [running]) for engine in engines}
    try:
        control.load(candidate)
        try:
            yield
        finally:
            control.unload(candidate, CANDIDATE_DRAIN_S)
    finally:
        if not control.versions(candidate):  # otherwise it still calls its engines
            for engine, before in others.items():
                control.only(engine, before or {number})


def compare(
    url: str,
    names: tuple[str, str],
    numbers: tuple[int, int],
    samples: Callable[[Client], Sequence[Mapping[str, Any]]],
    agreement: Agreement,
    on_progress: OnProgress = lambda done, total: None,
) -> PromotionTrial:
    """Send the same requests to both versions. Raises ServeError.

    `names`, `numbers`: of running one and candidate. `on_progress` is called with the requests that both answered, and
    with all.
    """
    sides = TriedVersion(numbers[0]), TriedVersion(numbers[1])
    agreements, shared = [], []
    with Client(url, names[0]) as one, Client(url, names[1]) as other:
        requests = [greedy(sample, one) for sample in samples(one)]
        for sample in requests:  # warm up the candidate
            TriedVersion(numbers[1]).ask(other, sample)
        total = ROUNDS * len(requests)
        for turn in range(total):
            on_progress(turn, total)
            sample = requests[turn % len(requests)]
            order = (0, 1) if turn % 2 else (1, 0)
            answers = {side: sides[side].ask((one, other)[side], sample) for side in order}
            expected, actual = answers[0], answers[1]
            if isinstance(actual, str):
                actual = actual.replace(names[1], names[0])
            if isinstance(expected, str) and expected == actual:
                shared.append(expected)
                continue
            for side, answer in zip(sides, (expected, actual), strict=True):
                if isinstance(answer, str):
                    side.errors.append(answer)
            if not isinstance(expected, str) and not isinstance(actual, str):
                agreements.append(agreement(expected, actual))
    return PromotionTrial(*sides, agreements, shared)


def greedy(sample: Mapping[str, Any], client: Client) -> dict[str, Any]:
    """Return the request without sampling or beam search, and for all labels, if the model has these options.

    Its answers can then be compared.
    """
    inputs = {field.name for field in client.signature.inputs}
    if "top_k" in inputs and "labels" in client.signature.parameters:
        return {**sample, "top_k": len(json.loads(client.signature.parameters["labels"]))}
    if not set(GREEDY) <= inputs:
        return dict(sample)
    return {**{name: value for name, value in sample.items() if name not in OF_BEAMS}, **GREEDY}


def same_tokens(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> OutputMatch:
    """Compare the tokens of two greedy answers up to the first difference: before it, both versions read the same text.

    Later tokens follow different texts and are not compared. So the share is next-token agreement. If answers do not
    name their tokens, their texts are compared instead.
    """
    if "logprobs_output" not in expected or "logprobs_output" not in actual:
        return OutputMatch(float(expected["text_output"] == actual["text_output"]))
    one, other = (_tokens(answer) for answer in (expected, actual))
    if not one and not other:
        return OutputMatch(1.0)  # both end at once
    same = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        same = min(len(one), len(other))
    return OutputMatch(same, max(1, same + (same < max(len(one), len(other)))))


def _tokens(answer: Mapping[str, Any]) -> list[int]:
    (logprobs,) = answer["logprobs_output"]
    return [token["token"] for token in json.loads(logprobs)]

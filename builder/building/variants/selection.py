"""Select the variant of a model to serve: the fastest that keeps the requested quality.

Every option is built and timed over fixed shapes; then their quality is judged, the fastest first. The first that keeps
the quality is served. Where the family measures traffic, the first and those nearly as fast are measured as they will
be served, and the best of them is served. A variant that misses the quality may leave layers in fp32 and is queued
again, at the speed that it then has. Variants that can no longer be served are dropped, since their files are large.
Knows times and qualities; the family's `Candidates` builds and judges a variant.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from builder.building.variants.timing import BUSY_SHARE, CpuWaitMeter
from builder.building.variants.traffic import Rates, fastest, in_words, remark_on_noise
from builder.common.errors import ExportError, VerificationError
from builder.common.progress import Stage
from builder.common.speed import Latencies
from builder.repository.report.record import MeasuredVariant

Option = TypeVar("Option")

MAX_FINALISTS = 4
NOT_COMPARED = "timed in another build than PyTorch"
MAX_SLOWDOWN = 2.5  # of a finalist to the fastest, over fixed shapes


@dataclass(frozen=True)
class Candidate(Generic[Option]):
    """Option with some of its layers left in fp32, as a variant: timed, then judged."""

    option: Option
    left_alone: int
    measured: MeasuredVariant
    order: int

    def judged(self, measured: MeasuredVariant) -> Candidate[Option]:
        return replace(self, measured=measured)


Served = Callable[[Sequence[Candidate[Option]]], Mapping[str, Rates]]  # requests a second by the name of the variant


class Candidates(Protocol[Option]):
    """Interface by which a family names, times and judges its variants."""

    @property
    def base(self) -> MeasuredVariant:
        """PyTorch, as a measured variant."""

    @property
    def served(self) -> Served[Option] | None:
        """Function that measures finalists as they will be served; None: the first that keeps the quality is served."""

    def name(self, option: Option) -> str:
        """Return the name of the variant of `option` when no layer is left in fp32."""

    def time(self, option: Option, left_alone: int) -> MeasuredVariant:
        """Return the variant with its size and latencies.

        Raises ExportError or VerificationError if it cannot be built.
        """

    def speed(self, latency: Latencies) -> float:
        """Return how many times as fast as PyTorch `latency` is."""

    def judge(self, candidate: Candidate[Option]) -> MeasuredVariant:
        """Return the variant with its quality."""

    def keeps(self, measured: MeasuredVariant) -> bool:
        """Return True if a variant that was judged keeps the requested quality."""

    def quality(self, measured: MeasuredVariant) -> float:
        """Return the number by which judged variants are compared; more is better."""

    def leave_more(self, candidate: Candidate[Option]) -> int | None:
        """Return how many layers to leave in fp32 next; None where more would not help."""

    def drop(self, candidate: Candidate[Option]) -> None:
        """Remove the files of a candidate that is not served."""

    def reached(self, measured: MeasuredVariant) -> str:
        """Return the quality of a variant in words, for example "cosine of 0.9981"."""

    def requirement(self) -> str:
        """Return the requested quality in words."""

    def refusal(self, judged: Sequence[MeasuredVariant]) -> str:
        """Return the error text if none of `judged` keeps the quality: why nothing is served, and what to do."""


@dataclass(frozen=True)
class Selection(Generic[Option]):
    """Variant that is served, all that were tried (the slowest first), and the reason if there was a choice."""

    chosen: Candidate[Option]
    tried: tuple[MeasuredVariant, ...]
    choice: str | None


def select(candidates: Candidates[Option], options: Sequence[Option], stage: Stage) -> Selection[Option]:
    """Select the fastest of `options` that keeps the quality. Raises VerificationError if there is none."""
    return _Selector(candidates, stage).run(options)


class _Selector(Generic[Option]):
    def __init__(self, candidates: Candidates[Option], stage: Stage) -> None:
        self.candidates = candidates
        self.stage = stage
        self.queue: list[tuple[float, int, Candidate[Option]]] = []  # the fastest first
        self.judged: list[Candidate[Option]] = []
        self.impossible: dict[str, str] = {}
        self.waited = 0.0  # share of the timing in which threads waited for a core

    def run(self, options: Sequence[Option]) -> Selection[Option]:
        self._time_all(options)
        finalists = self._finalists()
        if not self.judged:
            reasons = "; ".join(self.impossible.values())
            raise VerificationError(f"no variant of this checkpoint could be built: {reasons}")
        if not finalists:
            raise VerificationError(self.candidates.refusal([candidate.measured for candidate in self.judged]))
        chosen, why = self._final(finalists)
        rest = [candidate.measured for _, _, candidate in sorted(self.queue)]
        self._drop(one for one in finalists if one is not chosen)
        tried = sorted([*(c.measured for c in self.judged), *rest], key=self._slowness, reverse=True)
        choice = self._explain(chosen.measured, rest) + why if len(options) > 1 else None
        return Selection(chosen, tuple(tried), choice)

    def _time_all(self, options: Sequence[Option]) -> None:
        start, wait_meter = time.perf_counter(), CpuWaitMeter()
        for number, option in enumerate(options, 1):
            left_s = (time.perf_counter() - start) / max(number - 1, 1) * (len(options) - number + 1)
            progress = f", {number} of {len(options)}" + (f", about {left_s:.0f} s left" if number > 1 else "")
            name = self.candidates.name(option)
            with self.stage(name + progress * (len(options) > 1)):
                try:
                    self._push(option, 0, number)
                except (ExportError, VerificationError) as error:
                    if len(options) == 1:
                        raise
                    self.impossible[name] = str(error)
        self.waited = wait_meter.share

    def _push(self, option: Option, left_alone: int, order: int) -> None:
        measured = self.candidates.time(option, left_alone)
        heapq.heappush(self.queue, (self._slowness(measured), order, Candidate(option, left_alone, measured, order)))

    def _finalists(self) -> list[Candidate[Option]]:
        """Return the fastest that keep the quality and those nearly as fast; the others stay in the queue."""
        count = 1 if self.candidates.served is None else MAX_FINALISTS
        finalists: list[Candidate[Option]] = []
        while self.queue and len(finalists) < count:
            if finalists and self.queue[0][0] > MAX_SLOWDOWN * self._slowness(finalists[0].measured):
                break
            _, _, candidate = heapq.heappop(self.queue)
            with self.stage(f"judge {candidate.measured.name}"):
                candidate = candidate.judged(self.candidates.judge(candidate))
            self.judged.append(candidate)
            if self.candidates.keeps(candidate.measured):
                finalists.append(candidate)
                continue
            self._drop([candidate])
            if not finalists:
                self._leave_more(candidate)
        self._drop(candidate for _, _, candidate in self.queue)
        return finalists

    def _drop(self, candidates: Iterable[Candidate[Option]]) -> None:
        for candidate in candidates:
            self.candidates.drop(candidate)

    def _leave_more(self, candidate: Candidate[Option]) -> None:
        left_alone = self.candidates.leave_more(candidate)
        if left_alone is not None:
            with self.stage(f"{self.candidates.name(candidate.option)}, {left_alone} layers left in fp32"):
                self._push(candidate.option, left_alone, candidate.order)

    def _final(self, finalists: Sequence[Candidate[Option]]) -> tuple[Candidate[Option], str]:
        """Return the one that answers most requests (of equals, the best in quality), and the measurements in words."""
        if len(finalists) == 1 or self.candidates.served is None:
            return finalists[0], ""
        with self.stage("measure as served"):
            rates = self.candidates.served(finalists)
        best = rates[fastest(rates)]
        measured = [one for one in finalists if len(rates[one.measured.name].rounds) == len(best.rounds)]  # to the end
        equals = [one for one in measured if rates[one.measured.name].equals(best)]
        chosen = max(equals, key=lambda one: (self.candidates.quality(one.measured), rates[one.measured.name].typical))
        words = f"; requests a second as served, {in_words(rates)}"
        if len(equals) > 1:
            names = " and ".join(one.measured.name for one in equals)
            words += f"; {names} are equally fast within the noise, and {chosen.measured.name} has the better quality"
        return chosen, words + remark_on_noise(rates, "variant")

    def _slowness(self, measured: MeasuredVariant) -> float:
        return 1 / self.candidates.speed(measured.latency_ms)

    def _explain(self, chosen: MeasuredVariant, slower: Sequence[MeasuredVariant]) -> str:
        missed = [candidate.measured for candidate in self.judged if not self.candidates.keeps(candidate.measured)]
        speed = self._times(chosen)
        if speed != NOT_COMPARED:
            speed += " PyTorch's speed over fixed shapes"
        reached, required = self.candidates.reached(chosen), self.candidates.requirement()
        words = f"chose {chosen.name}: {speed}, with a {reached} where {required} is asked"
        if missed:
            words += "; missed it: "
            words += ", ".join(
                f"{measured.name} ({self._times(measured)}, {self.candidates.reached(measured)})" for measured in missed
            )
        if slower:
            words += "; slower: " + ", ".join(f"{measured.name} ({self._times(measured)})" for measured in slower)
        if self.impossible:
            words += "; not possible: "
            words += ", ".join(f"{name} ({reason})" for name, reason in self.impossible.items())
        if self.waited > BUSY_SHARE:
            words += (
                f"; other programs had the cores: threads waited for one {self.waited:.0%} of the time, so that times "
                "near each other say nothing; build again while nothing else runs"
            )
        return words

    def _times(self, measured: MeasuredVariant) -> str:
        """Return the speed-up in words, if one build timed the variant and PyTorch."""
        if measured.timed_in != self.candidates.base.timed_in:
            return NOT_COMPARED
        return f"{self.candidates.speed(measured.latency_ms):.1f}x"

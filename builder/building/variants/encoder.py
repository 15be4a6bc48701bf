"""Variants of an encoder: forms of one graph, timed over a grid of shapes, judged by the front's own answers.

Times and qualities are stored for the next build of the same checkpoint on the same machine, one file per key in the
user's cache folder. The key covers all that a measurement depends on; losing a file costs only the time to measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from builder.building.keys import code, key_of
from builder.building.variants.budget import LabelledJudge
from builder.building.variants.evaluator import Evaluator
from builder.building.variants.selection import Candidate
from builder.building.variants.traffic import Rates
from builder.building.verify.quality import Quality
from builder.common.cache.folder import cache_home
from builder.common.files import write_atomically
from builder.common.speed import Latencies, speed_up
from builder.engines.encoding import Variant
from builder.engines.optimise import Quantised
from builder.options import BuildSpec
from builder.repository.report.record import MeasuredVariant

ROUNDING = 1e-6  # of a mean of cosines: fp32 keeps a quality of 1


class Measurements:
    """Measured variants by name. Without a `path` they are not stored."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.variants: dict[str, MeasuredVariant] = {}
        if path is not None and path.is_file():
            with suppress(OSError, ValueError, TypeError):  # a damaged file counts as missing
                self.variants = {
                    name: MeasuredVariant(**measured) for name, measured in json.loads(path.read_text("utf-8")).items()
                }

    def remember(self, measured: MeasuredVariant) -> None:
        self.variants[measured.name] = measured
        if self.path is None:
            return
        with suppress(OSError):  # a full or read-only disk
            document = {name: asdict(known) for name, known in self.variants.items()}
            write_atomically(self.path, json.dumps(document).encode())


def measurements_of(facts: Mapping[str, Any]) -> Measurements:
    """Return the stored measurements that depend on `facts` (JSON) and on the builder's code."""
    return Measurements(cache_home() / "measured" / f"{key_of({'facts': facts, 'code': code()})[:32]}.json")


class Maker(Protocol):
    """Maker of the variants of one model."""

    @property
    def spec(self) -> BuildSpec:
        """Options of the build."""

    def sensitive(self, variant: Variant) -> Mapping[str, float]:
        """Return the error of each layer of `variant` that can be left alone, the largest first."""

    def make(self, variant: Variant, left_alone: Sequence[str] = ()) -> Quantised:
        """Build the graph of `variant`. Raises VerificationError if that fails."""

    def discard(self, variant: Variant, quantised: Quantised) -> None:
        """Remove the files of `variant`."""


@dataclass
class EncoderCandidates:
    """Candidates of an encoder: how its variants are built, timed and judged.

    `base`: PyTorch, which speeds are relative to; `exact`: the variant that was measured in every way already, and its
    quality; `prefix`: of the names of the other variants. `compares_times`: False for a single option; it is timed only
    if it keeps the quality, and in the session that judged it. `labelled`: judge of --budget.
    """

    evaluator: Evaluator
    maker: Maker
    base: MeasuredVariant
    exact: tuple[MeasuredVariant, Quality]
    threshold: float
    known: Measurements
    prefix: str
    compares_times: bool = True
    labelled: LabelledJudge | None = None
    qualities: dict[str, Quality] = field(default_factory=dict)
    """Qualities that were judged in this build, by the name of the variant."""
    _variants: dict[tuple[Variant, int], Quantised] = field(default_factory=dict)
    _layers: dict[Variant, Mapping[str, float]] = field(default_factory=dict)

    def name(self, option: Variant) -> str:
        return f"{self.prefix}{option.name}"

    def time(self, option: Variant, left_alone: int) -> MeasuredVariant:
        """Return the times, remembered or measured."""
        name = self.name(option) + (f", {left_alone} layers fp32" if left_alone else "")
        measured = self.exact[0] if name == self.exact[0].name else self.known.variants.get(name)
        if measured is None:
            graph = self.variant(option, left_alone).graph
            measured = MeasuredVariant(name, graph.size, self.evaluator.latency(graph) if self.compares_times else {})
            self.known.remember(measured)
        return measured

    def speed(self, latency: Latencies) -> float:
        return speed_up(latency, self.base.latency_ms)

    def judge(self, candidate: Candidate[Variant]) -> MeasuredVariant:
        """Return the variant with its quality.

        A variant remembered as too bad is not built again; one that is served always is. The quality on some samples is
        not remembered: on all of them, it may be as high as another build requires.
        """
        measured, exact = candidate.measured, self.exact
        if measured is exact[0]:
            self.qualities[measured.name] = exact[1]
            return measured
        if measured.quality is not None and not self.keeps(measured):
            return measured
        graph, evaluator = self.variant(candidate.option, candidate.left_alone).graph, self.evaluator
        infer = evaluator.opened(graph)
        min_mean = self.threshold - ROUNDING
        measured, self.qualities[measured.name] = evaluator.judged(measured, graph, infer, min_mean=min_mean)
        if self.labelled is not None:
            answers = evaluator.answers(graph, infer, self.labelled.requests, self.labelled.data["name"])
            measured = self.labelled.judged(measured, answers)
        if not self.compares_times and self.keeps(measured):
            measured = replace(measured, latency_ms=evaluator.latency(graph, infer))
        if measured.judged_samples is None:
            self.known.remember(measured)
        return measured

    def keeps(self, measured: MeasuredVariant) -> bool:
        ranking = self.evaluator.min_ranking
        return self.quality(measured) >= self.threshold - ROUNDING and all(
            measured.ranking[name] >= least for name, least in ranking.items() if name in measured.ranking
        )

    def quality(self, measured: MeasuredVariant) -> float:
        return self.evaluator.relative_quality(measured)

    def leave_more(self, candidate: Candidate[Variant]) -> int | None:
        """Return how many layers to leave alone next, at most half of them.

        That is twice as many as before or, if that is more, half as many as seem to suffice.
        One minus a cosine or a correlation grows with the square of the error, to which rounded layers add theirs. The
        quality on some samples stands for that on all.
        """
        errors = np.square(list(self._sensitive(candidate.option).values()))
        left_alone, most = candidate.left_alone, len(errors) // 2
        if left_alone >= most:
            return None
        allowed, missing = 1 - self.threshold, 1 - self.quality(candidate.measured)
        rest = np.cumsum(errors[::-1])[::-1]  # squared errors from each layer on
        enough = int((rest > rest[left_alone] * allowed / missing).sum()) if missing > allowed else 0
        return min(most, max(1, 2 * left_alone, enough // 2))

    def drop(self, candidate: Candidate[Variant]) -> None:
        """Remove its graph, if it was built. A later request builds it again."""
        built = self._variants.pop((candidate.option, candidate.left_alone), None)
        if built is not None:
            self.maker.discard(candidate.option, built)

    def served(self, candidates: Sequence[Candidate[Variant]]) -> Mapping[str, Rates]:
        """Measure how many requests a second the emitted front answers over each."""
        return self.evaluator.traffic(
            {one.measured.name: self.variant(one.option, one.left_alone).graph for one in candidates}
        )

    def reached(self, measured: MeasuredVariant) -> str:
        ranking = {name: measured.ranking[name] for name in self.evaluator.min_ranking if name in measured.ranking}
        some = measured.judged_samples
        on_some = "" if some is None else f" on {some} of {len(self.evaluator.samples)} samples"
        return _in_words({self.evaluator.metric: self.quality(measured), **ranking}) + on_some

    def requirement(self) -> str:
        return ", ".join(f"{value:.4f}" for value in (self.threshold, *self.evaluator.min_ranking.values()))

    def refusal(self, judged: Sequence[MeasuredVariant]) -> str:
        on_all = [measured for measured in judged if measured.judged_samples is None]
        best, spec = max(on_all or judged, key=self.quality), self.maker.spec
        compared = f"{len(on_all)} judged on all" if 0 < len(on_all) < len(judged) else f"{len(judged)} tried"
        ways = [
            *["use --precision fp32"] * (spec.precision != "fp32"),
            *["use a smaller --prune"] * (spec.prune is not None),
            "accept less with --quality" if self.labelled is None else "allow more with --budget",
        ]
        on_samples = " on the samples" if self.labelled is None and on_all else ""
        return (
            f"{best.name} reaches a {self.reached(best)}{on_samples}, the best of {compared}, layers left in fp32 "
            f"included; {self.requirement()} is required. Nothing was published: {', or '.join(ways)}"
        )

    def variant(self, option: Variant, left_alone: int) -> Quantised:
        """Return the graph of a variant."""
        key = (option, left_alone)
        if key not in self._variants:
            layers = list(self._sensitive(option))[:left_alone] if left_alone else []
            self._variants[key] = self.maker.make(option, layers)
        return self._variants[key]

    def _sensitive(self, option: Variant) -> Mapping[str, float]:
        if option not in self._layers:
            self._layers[option] = self.maker.sensitive(option)
        return self._layers[option]


def _in_words(measures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} of {value:.4f}" for name, value in measures.items())

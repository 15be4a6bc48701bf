"""Which variant of an encoder is served: the fastest that keeps the quality asked for.

Every variant is made and timed over fixed shapes, then judged from the fastest on. The first that keeps the quality and
those nearly as fast are measured as they will be served, which decides. One that does not keep it may leave its most
sensitive layers in fp32 and queue again, at the speed it then has. Times over fixed shapes and qualities are
remembered, for the next search over the same checkpoint on the same machine. Knows times and qualities; knows nothing
about graphs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from builder.errors import ExportError, VerificationError
from builder.optimise.quantised import Quantised
from builder.progress import Stage
from builder.report.record import Rung
from builder.speed import speed_up
from builder.variants.candidates import Variant, VariantMaker
from builder.variants.evaluator import Evaluator
from builder.variants.measurements import Measurements
from builder.variants.traffic import BUSY
from builder.verify.quality import Quality

FINALISTS = 4  # at most
WITHIN = 2.5  # how many times slower than the fastest a finalist may be, over shapes that were met before
ROUNDING = 1e-6  # of a mean of cosines: fp32 keeps a quality of 1


@dataclass(frozen=True)
class SearchResult:
    """The variant that is served, all rungs that were measured, and in words why this one."""

    variant: Variant
    quantised: Quantised
    quality: Quality
    chosen: Rung
    rungs: tuple[Rung, ...]
    choice: str | None


@dataclass(frozen=True)
class _Finalist:
    """A variant that keeps the quality asked for."""

    tried: _Tried
    rung: Rung
    quality: Quality


@dataclass(order=True)
class _Tried:
    """A variant with some layers left alone. The fastest comes first."""

    speed: float
    order: int
    variant: Variant
    left_alone: int
    rung: Rung


class Search:
    """One search. `base`: PyTorch, which speeds are relative to; `exact`: the rung that was measured in every way
    already, and its quality; `prefix`: what the names of the other rungs begin with.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        maker: VariantMaker,
        base: Rung,
        exact: tuple[Rung, Quality],
        threshold: float,
        known: Measurements,
        stage: Stage,
        prefix: str,
    ) -> None:
        self.evaluator = evaluator
        self.maker = maker
        self.base = base
        self.exact = exact
        self.threshold = threshold
        self.known = known
        self.stage = stage
        self.prefix = prefix
        self.quantised: dict[tuple[Variant, int], Quantised] = {}
        self.sensitive: dict[Variant, list[str]] = {}

    def run(self, variants: Sequence[Variant]) -> SearchResult:
        """Find the fastest of `variants`. Raises VerificationError with the best quality where none keeps it."""
        queue: list[_Tried] = []
        impossible: dict[str, str] = {}
        begun = time.perf_counter()
        for number, variant in enumerate(variants, 1):
            left_s = (time.perf_counter() - begun) / max(number - 1, 1) * (len(variants) - number + 1)
            progress = f", {number} of {len(variants)}" + (f", about {left_s:.0f} s left" if number > 1 else "")
            with self.stage(f"{self.prefix}{variant.name}" + progress * (len(variants) > 1)):
                try:
                    heapq.heappush(queue, self._time(variant, 0, number))
                except (ExportError, VerificationError) as error:
                    if len(variants) == 1:
                        raise
                    impossible[variant.name] = str(error)
        finalists, judged = self._finalists(queue)
        if not judged:
            raise VerificationError(f"nothing could be made of this checkpoint: {'; '.join(impossible.values())}")
        if not finalists:
            raise VerificationError(self._too_bad(judged))
        chosen, why = self._final(finalists)
        rest = [tried.rung for tried in sorted(queue)]
        rungs = tuple(sorted([*judged, *rest], key=self._slowness, reverse=True))
        choice = None
        if len(variants) > 1:
            missed = [rung for rung in judged if not self._keeps(rung)]
            choice = self._explain(chosen.rung, missed, rest, impossible) + why
        graph = self._graph(chosen.tried.variant, chosen.tried.left_alone)
        return SearchResult(chosen.tried.variant, graph, chosen.quality, chosen.rung, rungs, choice)

    def _finalists(self, queue: list[_Tried]) -> tuple[list[_Finalist], list[Rung]]:
        """Of `queue`, the fastest that keep the quality and are nearly as fast as the first; and all that was judged.

        `queue` is left with what was not judged.
        """
        finalists: list[_Finalist] = []
        judged: list[Rung] = []
        while queue and len(finalists) < FINALISTS:
            if finalists and queue[0].speed > WITHIN * finalists[0].tried.speed:
                break
            tried = heapq.heappop(queue)
            with self.stage(f"judge {tried.rung.name}"):
                rung, quality = self._judge(tried)
            judged.append(rung)
            if quality is not None and self._keeps(rung):
                finalists.append(_Finalist(tried, rung, quality))
            elif not finalists:
                more = self._leave_more(tried)
                if more is not None:
                    heapq.heappush(queue, more)
        return finalists, judged

    def _final(self, finalists: Sequence[_Finalist]) -> tuple[_Finalist, str]:
        """The one that answers most requests, and in words what was measured; of equals the one of best quality."""
        if len(finalists) == 1:
            return finalists[0], ""
        with self.stage("measure as served"):
            graphs = {f.rung.name: self._graph(f.tried.variant, f.tried.left_alone).graph for f in finalists}
            rates = self.evaluator.traffic(graphs)
        fastest = rates[max(rates, key=lambda name: rates[name].typical)]
        equals = [f for f in finalists if rates[f.rung.name].equals(fastest)]
        chosen = max(equals, key=lambda f: (self.evaluator.kept(f.rung), rates[f.rung.name].typical))
        clients = " and at ".join(map(str, fastest.by_clients))
        words = f"; requests a second as served, at {clients} clients: "
        words += ", ".join(f"{name} {rate}" for name, rate in rates.items())
        if len(equals) > 1:
            names = " and ".join(f.rung.name for f in equals)
            words += f"; {names} are equally fast within the noise, and {chosen.rung.name} has the better quality"
        worst = max(rate.spread for rate in rates.values())
        if worst > BUSY:
            words += f"; the machine was busy: the rounds of one variant are {worst:.0%} apart"
        return chosen, words

    def _too_bad(self, judged: Sequence[Rung]) -> str:
        best = max(judged, key=self.evaluator.kept)
        return (
            f"{best.name} reaches a {self.evaluator.metric} of {self.evaluator.kept(best):.4f} on the samples, the "
            f"best of {len(judged)} tried, layers left in fp32 included; {self.threshold:.4f} is required. Nothing "
            "was published: use --precision fp32"
            + ", a smaller --prune" * (self.maker.spec.prune is not None)
            + ", or accept less with --quality"
        )

    def _graph(self, variant: Variant, left_alone: int) -> Quantised:
        key = (variant, left_alone)
        if key not in self.quantised:
            names = self._sensitive(variant)[:left_alone] if left_alone else []
            self.quantised[key] = self.maker.make(variant, names)
        return self.quantised[key]

    def _sensitive(self, variant: Variant) -> list[str]:
        if variant not in self.sensitive:
            self.sensitive[variant] = self.maker.sensitive(variant)
        return self.sensitive[variant]

    def _time(self, variant: Variant, left_alone: int, order: int) -> _Tried:
        """A rung with its size and latency, remembered or measured."""
        name = f"{self.prefix}{variant.name}" + (f", {left_alone} layers fp32" if left_alone else "")
        rung = self.exact[0] if name == self.exact[0].name else self.known.recall(name)
        if rung is None:
            graph = self._graph(variant, left_alone).graph
            rung = Rung(name, graph.size, self.evaluator.latency(graph))
            self.known.remember(rung)
        return _Tried(self._slowness(rung), order, variant, left_alone, rung)

    def _judge(self, tried: _Tried) -> tuple[Rung, Quality | None]:
        """The rung with its quality. One remembered as too bad is not made again; one that is served always is."""
        if tried.rung is self.exact[0]:
            return self.exact
        if tried.rung.quality is not None and not self._keeps(tried.rung):
            return tried.rung, None
        graph = self._graph(tried.variant, tried.left_alone).graph
        quality = self.evaluator.quality(graph)
        rung = self.evaluator.judged(tried.rung, graph, quality)
        self.known.remember(rung)
        return rung, quality

    def _keeps(self, rung: Rung) -> bool:
        return self.evaluator.kept(rung) >= self.threshold - ROUNDING

    def _leave_more(self, tried: _Tried) -> _Tried | None:
        """The same with twice as many layers left in fp32, at most half of them."""
        sensitive = self._sensitive(tried.variant)
        left_alone = max(1, 2 * tried.left_alone)
        if left_alone > len(sensitive) // 2:
            return None
        with self.stage(f"{tried.rung.name.split(',')[0]}, {left_alone} of {len(sensitive)} layers left in fp32"):
            return self._time(tried.variant, left_alone, tried.order)

    def _slowness(self, rung: Rung) -> float:
        return 1 / speed_up(rung.latency_ms, self.base.latency_ms)

    def _explain(
        self, chosen: Rung, missed: Sequence[Rung], slower: Sequence[Rung], impossible: Mapping[str, str]
    ) -> str:
        def times(rung: Rung) -> str:
            return f"{speed_up(rung.latency_ms, self.base.latency_ms):.1f}x"

        words = (
            f"chose {chosen.name}: {times(chosen)} PyTorch's speed over fixed shapes, with a "
            f"{self.evaluator.metric} of {self.evaluator.kept(chosen):.4f} where {self.threshold:.4f} is asked"
        )
        if missed:
            words += "; missed it: " + ", ".join(f"{r.name} ({times(r)}, {self.evaluator.kept(r):.4f})" for r in missed)
        if slower:
            words += "; slower: " + ", ".join(f"{rung.name} ({times(rung)})" for rung in slower)
        if impossible:
            words += "; not possible: " + ", ".join(f"{name} ({reason})" for name, reason in impossible.items())
        return words

"""Variants of a generating model: precisions of its weights, judged by next tokens and by perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from builder.building.variants.selection import Candidate
from builder.common.speed import Latencies, speed_up
from builder.graphs.onnx.graph import Graph, remove_graph
from builder.repository.report.record import MeasuredVariant
from builder.repository.verdict import ParityBound

Variant = TypeVar("Variant")


@dataclass(frozen=True)
class Required:
    """Least agreement with PyTorch, and largest perplexity, as a ratio to PyTorch's."""

    quality: float
    perplexity: float

    def bounds(self, measured: MeasuredVariant, base: MeasuredVariant, metric: str) -> tuple[ParityBound, ...]:
        """Return the bounds that `measured` must keep. `metric`: the name of its `quality`."""
        return (
            ParityBound(f"the {metric} of {measured.name}", measured.quality or 0.0, at_least=self.quality),
            ParityBound(
                f"the perplexity of {measured.name} to PyTorch's", growth(measured, base), at_most=self.perplexity
            ),
        )

    def keeps(self, measured: MeasuredVariant, base: MeasuredVariant) -> bool:
        return all(bound.is_met for bound in self.bounds(measured, base, ""))

    def refusal(self, measured: MeasuredVariant, base: MeasuredVariant, metric: str) -> str:
        """Return why a variant that loses too much is not served, and what to do."""
        return (
            f"{measured.name} has a {metric} of {measured.quality:.4f} against PyTorch "
            f"({self.quality:.4f} is required) and its perplexity is {growth(measured, base):.4f} of PyTorch's "
            f"(at most {self.perplexity:.4f}). Nothing was published: use another --precision or --cache, or accept "
            "less with --quality and --perplexity"
        )


@dataclass
class PrecisionCandidates(Generic[Variant]):
    """Precisions to select from. `exact`: the verified variant in fp32, and its graphs; `base`: PyTorch's measurements.

    The family gives four functions: `make` builds the graphs of a precision, `timed` makes its variant, with size and
    latencies, `judged` adds the quality, and `graphs` lists the graphs of a variant, to be removed.
    """

    base: MeasuredVariant
    exact: tuple[MeasuredVariant, Variant]
    required: Required
    metric: str
    make: Callable[[str], Variant]
    timed: Callable[[str, Variant], MeasuredVariant]
    judged: Callable[[MeasuredVariant, Variant], MeasuredVariant]
    graphs: Callable[[Variant], Iterable[Graph]]
    served: None = None
    _variants: dict[str, Variant] = field(default_factory=dict)

    def name(self, option: str) -> str:
        return option

    def time(self, option: str, left_alone: int) -> MeasuredVariant:
        return self.exact[0] if option == self.exact[0].name else self.timed(option, self.variant(option))

    def speed(self, latency: Latencies) -> float:
        """Return the speed-up for tokens alone: a prompt is a small part of the time."""
        tokens = {cell: ms for cell, ms in self.base.latency_ms.items() if cell.startswith("token")}
        return speed_up(latency, tokens)

    def judge(self, candidate: Candidate[str]) -> MeasuredVariant:
        measured = candidate.measured
        return measured if measured is self.exact[0] else self.judged(measured, self.variant(candidate.option))

    def keeps(self, measured: MeasuredVariant) -> bool:
        return measured is self.exact[0] or self.required.keeps(measured, self.base)

    def quality(self, measured: MeasuredVariant) -> float:
        return measured.quality or 0.0

    def leave_more(self, candidate: Candidate[str]) -> int | None:
        return None

    def drop(self, candidate: Candidate[str]) -> None:
        if candidate.option in self._variants:
            for graph in self.graphs(self._variants.pop(candidate.option)):
                remove_graph(graph)

    def reached(self, measured: MeasuredVariant) -> str:
        perplexity = f"{growth(measured, self.base):.4f} of PyTorch's perplexity"
        return f"{self.metric} of {measured.quality or 0.0:.4f} and {perplexity}"

    def requirement(self) -> str:
        return f"at least {self.required.quality:.4f}, and at most {self.required.perplexity:.4f},"

    def refusal(self, judged: Sequence[MeasuredVariant]) -> str:
        return self.required.refusal(max(judged, key=self.quality), self.base, self.metric)

    def variant(self, option: str) -> Variant:
        """Return the graphs of a precision, built at the first use."""
        if option == self.exact[0].name:
            return self.exact[1]
        if option not in self._variants:
            self._variants[option] = self.make(option)
        return self._variants[option]


def growth(measured: MeasuredVariant, base: MeasuredVariant) -> float:
    """Return the perplexity as a ratio to PyTorch's; 1 if there is none."""
    return (measured.perplexity or 1.0) / (base.perplexity or 1.0)

"""Results of the stages of a decoder on one engine."""

from __future__ import annotations

from dataclasses import dataclass

from builder.building.variants.selection import Selection
from builder.building.verify.generation import DecoderReference
from builder.building.verify.long_rows import LongAnswers
from builder.engines.decoding import Lowered
from builder.engines.optimise import Quantised
from builder.graphs.export.decoder import DecoderExport
from builder.graphs.onnx.graph import Graph
from builder.repository.report.record import MeasuredVariant


@dataclass(frozen=True)
class PyTorchDecoder:
    """PyTorch's answers to the samples and to a row past every window, and its measurements."""

    answers: DecoderReference
    long: LongAnswers
    measured: MeasuredVariant


@dataclass(frozen=True)
class FusedDecoder:
    """Export with its fused graph."""

    exported: DecoderExport
    graph: Graph

    @property
    def exact(self) -> Lowered:
        """The graph unchanged: in fp32, over a cache in fp32."""
        return Lowered(self.graph, self.graph)


@dataclass(frozen=True)
class VerifiedDecoder:
    """Fused graph, verified against PyTorch, and its error on a row past every window.

    `mapped`: the graph was judged and timed with its weights left in their file, unlike the served one.
    """

    fused: FusedDecoder
    pytorch: PyTorchDecoder
    measured: MeasuredVariant
    long_error: float
    mapped: bool


@dataclass(frozen=True)
class SelectedDecoder:
    """Variant that is served: `graph`, as the release's engine reads it; `own`, as this build's engine ran it."""

    exact: VerifiedDecoder
    own: Graph
    graph: Graph
    variants: tuple[MeasuredVariant, ...]
    measured: MeasuredVariant
    quantised: tuple[Quantised, ...]
    selection: Selection[str]
    is_cacheable: bool

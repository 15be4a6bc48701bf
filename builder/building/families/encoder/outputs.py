"""Results of the stages of an encoder."""

from __future__ import annotations

import math
from dataclasses import dataclass

from builder.building.variants.evaluator import Evaluator
from builder.building.variants.selection import Selection
from builder.building.verify.parity import BatchReference
from builder.building.verify.quality import Quality
from builder.engines.encoding import Variant
from builder.engines.optimise import Quantised
from builder.engines.optimise.compaction import Removed
from builder.graphs.export.encoder import Export
from builder.graphs.onnx.graph import Graph
from builder.repository.report.record import MeasuredVariant


@dataclass(frozen=True)
class ExportedEncoder:
    """Export, with PyTorch's answers to long rows from before it."""

    export: Export
    long: tuple[BatchReference, ...]


@dataclass(frozen=True)
class FusedEncoder:
    """Graph without operators that do nothing, and its fused form."""

    exported: ExportedEncoder
    compacted: Graph
    graph: Graph
    empty: Removed | None


@dataclass(frozen=True)
class VerifiedEncoder:
    """Fused graph whose answers equal the reference's.

    `mapped`: the graph was judged and timed with its weights left in their file, unlike the served one.
    """

    fused: FusedEncoder
    evaluator: Evaluator
    pytorch: MeasuredVariant
    measured: MeasuredVariant
    quality: Quality
    mapped: bool

    @property
    def error(self) -> float:
        """Largest relative error against PyTorch."""
        return math.inf if self.measured.error is None else self.measured.error


@dataclass(frozen=True)
class SelectedEncoder:
    """Variant that is served, of those that were measured."""

    exact: VerifiedEncoder
    selection: Selection[Variant]
    quantised: Quantised
    quality: Quality
    variants: tuple[MeasuredVariant, ...]
    threshold: float
    pruned: Removed | None
    is_cacheable: bool

    @property
    def graph(self) -> Graph:
        return self.quantised.graph

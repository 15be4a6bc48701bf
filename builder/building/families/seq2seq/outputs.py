"""Results of the stages of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass

from builder.building.variants.selection import Selection
from builder.building.verify.seq2seq import Graphs, Seq2SeqReference
from builder.engines.optimise import Quantised
from builder.graphs.export.seq2seq import Seq2SeqExport
from builder.repository.report.record import MeasuredVariant


@dataclass(frozen=True)
class PyTorchSeq2Seq:
    """PyTorch's answers to the samples, and its measurements."""

    answers: Seq2SeqReference
    measured: MeasuredVariant


@dataclass(frozen=True)
class FusedSeq2Seq:
    """Export with its fused graphs."""

    exported: Seq2SeqExport
    graphs: Graphs


@dataclass(frozen=True)
class VerifiedSeq2Seq:
    """FusedSeq2Seq graphs, verified against PyTorch."""

    fused: FusedSeq2Seq
    pytorch: PyTorchSeq2Seq
    measured: MeasuredVariant


@dataclass(frozen=True)
class SelectedSeq2Seq:
    """Graphs that are served, of those that were measured."""

    exact: VerifiedSeq2Seq
    graphs: Graphs
    quantised: tuple[Quantised, ...]
    variants: tuple[MeasuredVariant, ...]
    selection: Selection[str]
    is_cacheable: bool = True  # the graphs are always judged as they are served

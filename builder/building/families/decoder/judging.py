"""Times of a decoder's graph as it is served, and its agreement with PyTorch's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from builder.building.families.decoder.outputs import FusedDecoder, PyTorchDecoder
from builder.building.variants import timing
from builder.building.verify.generation import (
    EXACT,
    INT8_CACHE,
    TOKEN_BY_TOKEN,
    DecoderAgreement,
    geometry_of,
    largest_values,
    measure,
    refuse_wrong_probabilities,
)
from builder.building.verify.long_rows import refuse_wrong_long_row
from builder.common.speed import Latencies
from builder.engines import LARGE
from builder.engines.decoding import DecodingEngine, Executors, Lowered, is_mapped, opened
from builder.repository.report.record import MeasuredVariant

FP32 = "fp32"  # the variant that is verified number by number


@dataclass(frozen=True)
class DecoderJudge:
    """Judge of the variants of one fused graph; `vocabulary`: the number of logits of a position."""

    engine: DecodingEngine
    fused: FusedDecoder
    pytorch: PyTorchDecoder
    vocabulary: int

    def measure_fp32(self, mapped: bool) -> tuple[MeasuredVariant, DecoderAgreement, float]:
        """Measure the graph in fp32 in every way, and its error on a long row; the weights are in memory once.

        Raises VerificationError if probabilities differ from PyTorch's.
        """
        long, caches = self.pytorch.long, self.fused.exported.caches
        executors = opened(self.fused.graph, self.engine.spec.build_threads, mapped)
        measured, agreement = self.measure(FP32, self.fused.exact, executors)
        refuse_wrong_probabilities(agreement.error)
        geometry = geometry_of(caches, 1, len(long.row.tokens), self.vocabulary)
        return measured, agreement, refuse_wrong_long_row(long, executors(geometry))

    def measure(
        self, name: str, lowered: Lowered, executors: Executors | None = None
    ) -> tuple[MeasuredVariant, DecoderAgreement]:
        """Measure the size, times and agreement of `lowered`. `executors`: over it, if it is open."""
        executors = executors or opened(lowered.judged, self.engine.spec.build_threads)
        measured, agreement = self.compare(MeasuredVariant(name, lowered.graph.size, {}), lowered, executors)
        return replace(measured, latency_ms=self._latency(lowered, executors)), agreement

    def time(self, name: str, lowered: Lowered) -> MeasuredVariant:
        """Return its size, and the time of a token and of a prompt."""
        return MeasuredVariant(name, lowered.graph.size, self._latency(lowered))

    def compare(
        self, measured: MeasuredVariant, lowered: Lowered, executors: Executors | None = None
    ) -> tuple[MeasuredVariant, DecoderAgreement]:
        """Return `measured` with its agreement with PyTorch's answers."""
        order = EXACT if lowered == self.fused.exact else INT8_CACHE if lowered.cache == "int8" else TOKEN_BY_TOKEN
        if lowered.graph.size >= LARGE:  # its cache for many rows is large too
            order = replace(order, rows=TOKEN_BY_TOKEN.rows)
        executors = executors or opened(lowered.judged, self.engine.spec.build_threads)
        caches = self.fused.exported.caches
        agreement = measure(executors, caches, self.vocabulary, self.pytorch.answers, lowered.cache, order)
        judged = replace(
            measured,
            error=agreement.error,
            quality=agreement.mean,
            worst=agreement.worst,
            batch_agreement=agreement.same_alone,
            perplexity=agreement.perplexity,
        )
        return judged, agreement

    def largest_values(self) -> Mapping[str, np.ndarray]:
        """Return the largest keys and values on the samples, by which an 8-bit cache is scaled."""
        graph = self.fused.graph
        executors = opened(graph, self.engine.spec.build_threads, is_mapped(graph, False))
        return largest_values(executors, self.fused.exported.caches, self.vocabulary, self.pytorch.answers)

    def _latency(self, lowered: Lowered, executors: Executors | None = None) -> Latencies:
        """Return the latencies of `lowered` where this machine runs it as it is served."""
        if not self.engine.timed:
            return {}
        threads, caches = self.engine.spec.build_threads, self.fused.exported.caches
        executors = executors or opened(lowered.judged, threads)
        return timing.decoder_latencies(
            executors, caches, self.vocabulary, lowered.cache, self.engine.spec.chooses_by_time
        )

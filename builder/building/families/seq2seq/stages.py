"""Stages of an encoder-decoder, from the export to the entries of the repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from builder.building.families import GRAPHS, Result, code_not_run
from builder.building.families.generating import (
    generation_serving,
    measured_pytorch,
    needing_cpus,
    parity_bounds,
    precisions,
    quantised_parts,
    report_of,
    vocabulary_of,
)
from builder.building.families.seq2seq.settings import Settings, token_rows, verified_beginning
from builder.building.variants import timing
from builder.building.variants.generating import PrecisionCandidates, Required
from builder.building.variants.selection import Selection, select
from builder.building.verify.runtimes import Replay
from builder.building.verify.seq2seq import (
    Graphs,
    Seq2SeqAgreement,
    Seq2SeqReference,
    make_reference,
    measure,
    recorded,
    refuse_wrong_answers,
    text_agreement,
)
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.generation_config import end_ids
from builder.checkpoints.metrics import score_texts
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.memory import ReservedMemory
from builder.common.progress import Stage
from builder.common.workplace import require_disk_space
from builder.engines.onnxruntime import loop_session
from builder.engines.optimise import Quantised
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.seq2seq import Seq2SeqExport, export_seq2seq
from builder.graphs.onnx.graph import check_release
from builder.graphs.onnx.operators import ATTENTION, CACHED_ATTENTION
from builder.graphs.onnx.searches import for_searches
from builder.graphs.onnx.shared_tables import with_shared_tables
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.layout.generating import lay_out_generating
from builder.repository.report.record import BuildReport, MeasuredVariant
from builder.repository.verdict import Comparison
from builder.runtime.contract import Arena, EncoderInput, GenerationServing
from builder.runtime.fields import Field

VERIFIED_BEAMS = 4  # more beams take longer to verify, and show no more


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
    """Fused graphs, verified against PyTorch."""

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


@dataclass(frozen=True)
class Seq2Seq:
    """Stages of an encoder-decoder, judged on `samples`; `source` says how their texts are read."""

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path
    settings: Settings
    source: EncoderInput
    memory: ReservedMemory
    samples: tuple[Mapping[str, Any], ...]

    def export(self) -> Seq2SeqExport:
        """Export an encoder and a decoder step. Raises RepositoryError if the disk is too full for them."""
        words = self.checkpoint.model.get_input_embeddings().weight.numel() * 4  # each of the two graphs has them
        require_disk_space(self.memory.weights + words, GRAPHS)
        return export_seq2seq(self.checkpoint.model, self.folder, self.settings.beams)

    def reference(self, exported: Seq2SeqExport) -> PyTorchSeq2Seq:
        """Return greedy and searched answers, their probabilities, and the time of a text and of a step."""
        model, beams = self.checkpoint.model, min(self.settings.beams, VERIFIED_BEAMS)
        rows = token_rows(self.samples, self.checkpoint, self.source)
        ends = end_ids(self.settings.config, self.checkpoint.tokenizer, vocabulary_of(model))
        answers = make_reference(model, rows, *verified_beginning(self.source), ends, beams)
        latency = timing.pytorch_seq2seq_latencies(model, self.spec.build_threads)
        return PyTorchSeq2Seq(answers, measured_pytorch(self.memory, latency, answers.perplexity))

    def fuse(self, exported: Seq2SeqExport) -> FusedSeq2Seq:
        """Fuse both graphs; add inputs and outputs for beam search, and for rows beside it, to the decoder's.

        Raises an error if the release's engine cannot run the decoder.
        """
        encoder, decoder = fuse(exported.encoder, self.folder), fuse(exported.decoder, self.folder)
        vocabulary, beams = vocabulary_of(self.checkpoint.model), self.settings.beams
        if beams > 1:
            decoder = for_searches(decoder, beams, self.folder)
        check_release(decoder, self.spec.triton, in_process=True)
        return FusedSeq2Seq(exported, Graphs(encoder, decoder, exported.caches, exported.cross, beams, vocabulary))

    def verify(self, fused: FusedSeq2Seq, reference: PyTorchSeq2Seq) -> VerifiedSeq2Seq:
        """Compare probabilities and answers."""
        reference = replace(
            reference, measured=replace(reference.measured, scores=self._scores(reference.answers.greedy))
        )
        graphs = fused.graphs
        measured, agreement = self._judged(MeasuredVariant("fp32", graphs.size, {}), graphs, reference.answers)
        measured = replace(measured, latency_ms=self._timed("fp32", graphs).latency_ms)
        refuse_wrong_answers(self.checkpoint.model, reference.answers, agreement)
        return VerifiedSeq2Seq(fused, reference, measured)

    def select(self, exact: VerifiedSeq2Seq, stage: Stage) -> SelectedSeq2Seq:
        """Choose the requested weights, or the fastest that keep the quality."""
        graphs, none = exact.fused.graphs, tuple[Quantised, ...]()
        candidates = PrecisionCandidates(
            exact.pytorch.measured,
            (exact.measured, none),
            self._required,
            self.checkpoint.task.metric,
            make=lambda precision: self._quantised(graphs, precision),
            timed=lambda precision, parts: self._timed(precision, _with(graphs, parts)),
            judged=lambda measured, parts: self._judged(measured, _with(graphs, parts), exact.pytorch.answers)[0],
            graphs=lambda parts: [part.graph for part in parts],
        )
        selection = select(candidates, precisions(self.spec.precision, self.spec.triton, in_process=True), stage)
        quantised = candidates.variant(selection.chosen.option)
        variants = (
            exact.pytorch.measured,
            exact.measured,
            *(one for one in selection.tried if one is not exact.measured),
        )
        return SelectedSeq2Seq(exact, _with(graphs, quantised), quantised, variants, selection)

    def replay(self, choice: SelectedSeq2Seq) -> Replay:
        """Return calls with a few texts together, one of them with beam search too."""
        graphs, answers, threads = choice.graphs, choice.exact.pytorch.answers, self.spec.build_threads
        return Replay(graphs.decoder.engine, True, lambda: [recorded(graphs, answers, threads)])

    def result(self, choice: SelectedSeq2Seq, stage: Stage) -> Result:
        """Return the decode loop with its graphs inside."""
        checkpoint, source, graphs = self.checkpoint, self.source, choice.graphs
        fields = checkpoint.task.fields({"languages": bool(source.languages or source.pairs)})
        tokenizer = tokenizer_json(checkpoint.tokenizer)
        serving = needing_cpus(self._serving(graphs, fields[0]), self.spec, [graphs.decoder, graphs.encoder])
        served = with_shared_tables([graphs.decoder, graphs.encoder], self.folder / "served")
        entries = lay_out_generating(self.spec, serving, tokenizer, served, fields)
        measured, exact, metric = choice.selection.chosen.measured, choice.exact, checkpoint.task.metric
        bounds = parity_bounds(self._required, exact.measured, measured, exact.pytorch.measured, metric)
        return Result(entries, Comparison(bounds), self._report(choice, entries))

    def _serving(self, graphs: Graphs, fields: Sequence[Field]) -> GenerationServing:
        """Return the settings, for serving.json, of the emitted loop over `graphs`, whose requests have `fields`."""
        spec, settings = self.spec, self.settings
        return generation_serving(
            spec,
            self.checkpoint,
            settings.config,
            Arena(spec.slots, settings.max_answer, "float32", graphs.caches),
            loop_session(spec.loop_threads, spec.serving.spinning),
            settings.beams,
            fields,
            start=1,
            executor="in-process",
            model=graphs.decoder.path.name,
            outputs=graphs.decoder.outputs,
            source=replace(self.source, encoder=graphs.encoder.path.name),
        )

    def _report(self, chosen: SelectedSeq2Seq, entries: Sequence[RepositoryEntry]) -> BuildReport:
        graphs, selection = chosen.graphs, chosen.selection
        operators = graphs.encoder.operators + graphs.decoder.operators
        encoder_attentions = chosen.exact.fused.exported.encoder_attentions
        encoder_layers = int(self.checkpoint.config.num_hidden_layers)
        unfused = None
        if encoder_attentions < encoder_layers:
            unfused = (
                f"{encoder_attentions} of {encoder_layers} attentions of the encoder are fused; the others run as "
                "separate operators, which is right but slower and takes memory quadratic in the length"
            )
        return report_of(
            self.spec,
            self.checkpoint,
            graphs.decoder.engine,
            replace(self.memory, weights=graphs.size),
            operators,
            entries,
            attention={
                "fused": operators[ATTENTION] + operators[CACHED_ATTENTION],
                "layers": len(graphs.caches) + len(graphs.cross) + encoder_layers,
            },
            quantised=quantised_parts(selection.chosen.option, chosen.quantised),
            variants=chosen.variants,
            samples=len(chosen.exact.pytorch.answers.sources),
            warnings=tuple(filter(None, [code_not_run(self.checkpoint), unfused])),
            choice=selection.choice,
            chosen=selection.chosen.measured.name,
        )

    @property
    def _required(self) -> Required:
        return Required(self.checkpoint.task.required(self.spec.quality), self.spec.perplexity)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.checkpoint.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _scores(self, answers: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return the task's usual scores of `answers`, if the samples have reference texts."""
        labels = self.checkpoint.task.labels
        targets = [str(sample[key]) for sample in self.samples for key in labels if key in sample]
        return score_texts(targets, [self._decode(answer) for answer in answers]) if targets else {}

    def _timed(self, name: str, graphs: Graphs) -> MeasuredVariant:
        """Return their size, and the time of a text and of a token."""
        return MeasuredVariant(
            name, graphs.size, timing.seq2seq_latencies(graphs, self.spec.build_threads, self.spec.chooses_by_time)
        )

    def _judged(
        self, measured: MeasuredVariant, graphs: Graphs, reference: Seq2SeqReference
    ) -> tuple[MeasuredVariant, Seq2SeqAgreement]:
        """Return `measured` with its measures against PyTorch's answers."""
        agreement = measure(graphs, reference, self.spec.build_threads)
        texts = text_agreement(reference.greedy, agreement.greedy, self._decode)
        judged = replace(
            measured,
            error=agreement.error,
            quality=float(np.mean(texts)),
            worst=min(texts),
            batch_agreement=agreement.alone,
            perplexity=agreement.perplexity,
            tokens=agreement.hits,
            answers=float(np.mean([a == b for a, b in zip(reference.greedy, agreement.greedy, strict=True)])),
            scores=self._scores(agreement.greedy),
        )
        return judged, agreement

    def _quantised(self, graphs: Graphs, precision: str) -> tuple[Quantised, ...]:
        options, grids = self.spec.weight_options, self.checkpoint.grids
        both = (graphs.encoder, graphs.decoder)
        return tuple(quantise_weights(graph, precision, options, self.folder, grids) for graph in both)


def _with(graphs: Graphs, quantised: tuple[Quantised, ...]) -> Graphs:
    return replace(graphs, encoder=quantised[0].graph, decoder=quantised[1].graph) if quantised else graphs

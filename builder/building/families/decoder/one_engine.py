"""A decoder on one engine: its stages, from the export to the report.

The packages of the engines build their own form of the graph (builder/engines/decoding.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from builder.building.families import GRAPHS, MAPPED, UNTIMED, built_from, code_not_run
from builder.building.families.generating import (
    exact_bound,
    kept_bounds,
    larger_than_stored,
    measured_pytorch,
    precisions,
    quantised_parts,
    report_of,
    serving_document,
    vocabulary_of,
)
from builder.building.variants import steps
from builder.building.variants.generating import PrecisionCandidates, Required
from builder.building.variants.selection import Selection, select
from builder.building.verify.generation import (
    EXACT,
    TOKEN_BY_TOKEN,
    TOLERANCE,
    Agreement,
    Reference,
    geometry_of,
    largest_values,
    make_reference,
    measure,
    refuse_wrong_probabilities,
    refuse_wrong_text,
)
from builder.building.verify.long_rows import LongAnswers, ask_long_row, refuse_wrong_long_row, unreached
from builder.building.verify.recording import STEPS, Case, Recorder, drive, past_the_window
from builder.building.verify.runtimes import Replay
from builder.checkpoints.chat_template import chat_template, part_roles, tool_template
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.generation_config import total_length
from builder.checkpoints.thinking import thinking
from builder.checkpoints.tokenizer import tokenizer_json
from builder.checkpoints.tool_parser import tool_parser
from builder.common.errors import VerificationError
from builder.common.memory import Memory
from builder.common.progress import Stage
from builder.common.speed import Latencies
from builder.common.workplace import refuse_without_room
from builder.engines import LARGE, refuse_to_choose
from builder.engines.decoding import DecodingEngine, Executors, Lowered, is_mapped, judging, let_go, opened
from builder.engines.optimise.quantised import Quantised
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.graphs.export.experts import cost_of_experts
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.layout.generating import lay_out_generating
from builder.repository.report.record import BuildReport, EngineCheck, MeasuredVariant
from builder.repository.verdict import Comparison, ParityBound
from builder.runtime.contract import Arena, Chat, GenerationServing, LayerShape

FP32 = "fp32"  # the variant that is verified number by number
LONG_PROMPT = 24  # tokens of the prompts that are run on the engine of the release too


@dataclass(frozen=True)
class Measured:
    """PyTorch's answers to the samples and to a row past every window, and its `MeasuredVariant`."""

    answers: Reference
    long: LongAnswers
    measured: MeasuredVariant


@dataclass(frozen=True)
class Fused:
    """Export with its fused graph."""

    exported: DecoderExport
    graph: Graph

    @property
    def exact(self) -> Lowered:
        """Return the graph unchanged: in fp32, over a cache in fp32."""
        return Lowered(self.graph, self.graph)


@dataclass(frozen=True)
class Exact:
    """Fused graph, verified against PyTorch, and its error on a row past every window.

    `mapped`: the graph was judged and timed with its weights left in their file, otherwise than it is served.
    """

    fused: Fused
    pytorch: Measured
    measured: MeasuredVariant
    long_error: float
    mapped: bool


@dataclass(frozen=True)
class Chosen:
    """Variant that is served: `graph`, as the release's engine reads it; `own`, as this build's engine ran it."""

    exact: Exact
    own: Graph
    graph: Graph
    variants: tuple[MeasuredVariant, ...]
    measured: MeasuredVariant
    quantised: tuple[Quantised, ...]
    selection: Selection[str]


@dataclass(frozen=True)
class Decoder:
    """Steps of a decoder, judged on token rows: `rows`. `layers`: what each of the model's puts into its cache."""

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path
    engine: DecodingEngine
    memory: Memory
    layers: tuple[LayerShape, ...]
    rows: tuple[tuple[int, ...], ...]

    def export(self) -> DecoderExport:
        """Return one graph for prefill and decode steps. Raises RepositoryError where the disk has no room for it."""
        refuse_without_room(self.memory.weights, GRAPHS)
        return export_decoder(self.checkpoint.model, self.folder, self.checkpoint.max_length, self.layers)

    def reference(self, exported: DecoderExport) -> Measured:
        """Return teacher-forced probabilities, those of a long row, and the time of a step."""
        model = self.checkpoint.model
        answers, long = make_reference(model, self.rows), ask_long_row(model, self.checkpoint.max_length)
        latency = steps.pytorch_decoder(model, self.spec.build_threads) if self.engine.timed else {}
        return Measured(answers, long, measured_pytorch(self.memory, latency, answers.perplexity))

    def fuse(self, exported: DecoderExport) -> Fused:
        """Return the fused graph. Raises an error where the release's engine would not run it."""
        return Fused(exported, self.engine.fuse(exported.graph, self.folder))

    def verify(self, fused: Fused, reference: Measured) -> Exact:
        """Compare probabilities, then a row past every window, then greedy texts.

        The texts come last, when no engine has its weights open.
        """
        mapped = self._mapped(fused.graph)
        measured, agreement, long_error = self._compared(fused, reference, mapped)
        let_go(fused.graph)
        refuse_wrong_text(self.checkpoint.model, reference.answers, agreement)
        return Exact(fused, reference, measured, long_error, mapped)

    def select(self, exact: Exact, stage: Stage) -> Chosen:
        """Choose the precision, requested or fastest within the quality; then the cache; then the release's form."""
        exact, checkpoint = self._as_served(exact, stage), self.checkpoint
        metric, first = checkpoint.task.metric, exact.fused.exact
        candidates = PrecisionCandidates(
            exact.pytorch.measured,
            (exact.measured, first),
            self._required,
            metric,
            make=lambda precision: self.engine.lower(exact.fused.graph, precision, self.folder, checkpoint.grids),
            timed=lambda precision, lowered: self._timed(self.engine.variant_name(precision), exact.fused, lowered),
            judged=lambda measured, form: self._judged(measured, exact.fused, exact.pytorch, form, self._open(form))[0],
            graphs=lambda form: (form.graph, form.judged),
        )
        selection = select(candidates, self._precisions, stage)
        measured, lowered = selection.chosen.measured, candidates.variant(selection.chosen.option)
        graph = lowered.graph
        variants = (
            exact.pytorch.measured,
            exact.measured,
            *(one for one in selection.tried if one is not exact.measured),
        )
        if self.spec.cache != "fp32":
            name = f"{measured.name}, {self.spec.cache} cache"
            with stage(name):
                graph = self.engine.shrink_cache(graph, lambda: self._largest_values(exact), self.folder)
                small = Lowered(graph, graph, self.engine.cache_type)
                measured, _ = self._measure(name, exact.fused, exact.pytorch, small, self._open(small))
            variants = (*variants, measured)
            if not self._required.keeps(measured, exact.pytorch.measured):
                raise VerificationError(self._required.refusal(measured, exact.pytorch.measured, metric))
        own, served = self.engine.for_release(graph, self.folder)
        return Chosen(exact, own, served, variants, measured, lowered.quantised, selection)

    def lasts(self, chosen: Chosen) -> bool:
        """Return False if fp32 may be served and was not judged as served: the next build may have the memory."""
        return not (chosen.exact.mapped and FP32 in self._precisions)

    def replay(self, chosen: Chosen) -> Replay:
        """Return calls with rows in pieces, past the windows and together."""
        return Replay(chosen.own.engine, self._in_process, lambda: [self._case(chosen)])

    def lay_out(self, chosen: Chosen, stage: Stage) -> tuple[RepositoryEntry, ...]:
        """Return the decode loop with its graph inside or, for BLS, beside it."""
        checkpoint, caches, graph = self.checkpoint, chosen.exact.fused.exported.caches, chosen.graph
        graphs = [graph, *self.engine.beside(graph, caches, self.folder)]
        tokenizer, fields = tokenizer_json(checkpoint.tokenizer), checkpoint.task.fields({})
        inputs = self.engine.step_fields(graph, caches)
        return lay_out_generating(self.spec.layout, self.serving(graph, caches), tokenizer, graphs, fields, inputs)

    def serving(self, graph: Graph, caches: Sequence[LayerShape]) -> GenerationServing:
        """Return what serving.json tells the emitted loop over `graph`."""
        spec, checkpoint, engine = self.spec, self.checkpoint, self.engine
        config, template = checkpoint.model.generation_config, chat_template(checkpoint.tokenizer)
        blocks = engine.blocks(caches, self.memory)
        return serving_document(
            spec.serving,
            checkpoint,
            config,
            Arena(spec.slots, checkpoint.max_length, engine.cache_type, caches, blocks),
            engine.session(),
            spec.beams or spec.slots,
            checkpoint.task.fields({})[0],
            executor=spec.executor,
            prefill_tokens=spec.serving.prefill_tokens,
            model=graph.path.name if self._in_process else None,
            copier=engine.copier,
            engine=None if self._in_process else f"{spec.entry_name}_model",
            inputs=graph.inputs,
            outputs=graph.outputs,
            total_length=total_length(config),
            prefix_cache=spec.serving.prefix_cache,
            chat=None if template is None else self._chat(template),
            fill=getattr(checkpoint.tokenizer, "fill_token", None),
        )

    def _chat(self, template: str) -> Chat:
        tokenizer = self.checkpoint.tokenizer
        chat = Chat(template, dict(tokenizer.special_tokens_map), tool_template(tokenizer))
        parser = self.spec.serving.tool_parser or tool_parser(chat)
        marks = thinking(chat, tokenizer.all_special_tokens)
        return replace(chat, tool_parser=parser, part_roles=part_roles(chat), thinking=marks)

    def comparison(self, chosen: Chosen) -> Comparison:
        """Compare log-probabilities of the fused graph, on a long row too, and what quantising kept."""
        exact, metric = chosen.exact, self.checkpoint.task.metric
        long = ParityBound("the same on a long row", exact.long_error, at_most=TOLERANCE)
        bounds = kept_bounds(self._required, exact.measured, chosen.measured, exact.pytorch.measured, metric)
        return Comparison((exact_bound(exact.measured), long, *bounds))

    def report(
        self, chosen: Chosen, entries: Sequence[RepositoryEntry], checks: tuple[EngineCheck, ...]
    ) -> BuildReport:
        exported, checkpoint, operators = chosen.exact.fused.exported, self.checkpoint, chosen.graph.operators
        selection = chosen.selection
        return report_of(
            built_from(self.spec.layout, self.spec.samples, checkpoint),
            checkpoint.task,
            self.spec.quality,
            replace(self.memory, weights=chosen.graph.size),
            operators,
            entries,
            checks,
            attention={"fused": operators[self.engine.attention], "layers": len(exported.caches)},
            quantised=quantised_parts(selection.chosen.option, chosen.quantised),
            variants=chosen.variants,
            samples=len(chosen.exact.pytorch.answers.rows),
            warnings=(
                *(() if self.engine.timed else (UNTIMED,)),
                *self.engine.remarks,
                *((MAPPED,) if self.engine.timed and chosen.exact.mapped else ()),
                *unreached(checkpoint.model.config, checkpoint.max_length),
                *filter(
                    None,
                    [
                        code_not_run(checkpoint),
                        cost_of_experts(checkpoint.model),
                        larger_than_stored(self.spec.precision, checkpoint),
                    ],
                ),
                *(f"{name} runs as separate operators, which is right but slower" for name in exported.rotary_left),
            ),
            choice=selection.choice,
            chosen=chosen.measured.name,
        )

    @property
    def _in_process(self) -> bool:
        return self.spec.executor == "in-process"

    @property
    def _precisions(self) -> tuple[str, ...]:
        return precisions(self.spec.precision, self.spec.triton, self._in_process)

    def _mapped(self, graph: Graph) -> bool:
        """Return True if fp32 is judged over its file.

        Raises BuilderError if it is to be chosen by its time as served.
        """
        served = FP32 in self._precisions
        mapped = is_mapped(graph, served)
        if mapped and served and self.spec.chooses_by_time:
            refuse_to_choose(graph.size)
        return mapped

    def _as_served(self, exact: Exact, stage: Stage) -> Exact:
        """Judge and time `exact` anew as served, if this build can and an earlier one judged it from its file."""
        lowered = exact.fused.exact
        if not exact.mapped or FP32 not in self._precisions or self._mapped(lowered.graph):
            return exact
        with stage(f"judge {FP32} as served"):
            measured, agreement = self._measure(FP32, exact.fused, exact.pytorch, lowered, self._open(lowered))
        refuse_wrong_probabilities(agreement)
        return replace(exact, measured=measured, mapped=False)

    @property
    def _required(self) -> Required:
        return Required(self.checkpoint.task.required(self.spec.quality), self.spec.perplexity)

    def _compared(self, fused: Fused, reference: Measured, mapped: bool) -> tuple[MeasuredVariant, Agreement, float]:
        """Measure the graph in fp32 in every way, and its error on a long row; the weights are in memory once."""
        lowered, long = fused.exact, reference.long
        executors = judging(fused.graph, self.spec.build_threads, mapped)
        measured, agreement = self._measure(FP32, fused, reference, lowered, executors)
        refuse_wrong_probabilities(agreement)
        vocabulary = vocabulary_of(self.checkpoint.model)
        geometry = geometry_of(fused.exported.caches, 1, len(long.row.tokens), vocabulary)
        return measured, agreement, refuse_wrong_long_row(long, executors(geometry))

    def _open(self, lowered: Lowered) -> Executors:
        return opened(lowered.judged, self.spec.build_threads)

    def _measure(
        self, name: str, fused: Fused, reference: Measured, lowered: Lowered, executors: Executors
    ) -> tuple[MeasuredVariant, Agreement]:
        """Measure `lowered`, over which `executors` run, in every way."""
        measured = MeasuredVariant(name, lowered.graph.size, {})
        judged, agreement = self._judged(measured, fused, reference, lowered, executors)
        return replace(judged, latency_ms=self._latency(fused, lowered, executors)), agreement

    def _timed(self, name: str, fused: Fused, lowered: Lowered) -> MeasuredVariant:
        """Return its size, and the time of a token and of a prompt."""
        return MeasuredVariant(name, lowered.graph.size, self._latency(fused, lowered))

    def _latency(self, fused: Fused, lowered: Lowered, executors: Executors | None = None) -> Latencies:
        """Return the latencies of `lowered` where this machine runs it as served.

        `executors`: over it, if it is open.
        """
        if not self.engine.timed:
            return {}
        vocabulary = vocabulary_of(self.checkpoint.model)
        executors = executors or self._open(lowered)
        choosing = self.spec.chooses_by_time
        return steps.decoder(executors, fused.exported.caches, vocabulary, lowered.cache, choosing)

    def _judged(
        self, measured: MeasuredVariant, fused: Fused, reference: Measured, lowered: Lowered, executors: Executors
    ) -> tuple[MeasuredVariant, Agreement]:
        """Return `measured` with its measures against PyTorch's answers."""
        vocabulary = vocabulary_of(self.checkpoint.model)
        course = EXACT if lowered == fused.exact else TOKEN_BY_TOKEN
        if lowered.graph.size >= LARGE:  # its cache for many rows is large too
            course = replace(course, rows=TOKEN_BY_TOKEN.rows)
        agreement = measure(executors, fused.exported.caches, vocabulary, reference.answers, lowered.cache, course)
        judged = replace(
            measured, error=agreement.error, quality=agreement.mean, worst=agreement.worst,
            batch_agreement=agreement.same_alone, perplexity=agreement.perplexity,
        )  # fmt: skip
        return judged, agreement

    def _largest_values(self, exact: Exact) -> Mapping[str, np.ndarray]:
        """Return the largest keys and values on the samples, by which an 8-bit cache is scaled."""
        fused, vocabulary = exact.fused, vocabulary_of(self.checkpoint.model)
        executors = judging(fused.graph, self.spec.build_threads, is_mapped(fused.graph, False))
        return largest_values(executors, fused.exported.caches, vocabulary, exact.pytorch.answers)

    def _case(self, chosen: Chosen) -> Case:
        """Return the answers of `own` in this build's engine, which `graph` must repeat."""
        spec, checkpoint, answers = self.spec, self.checkpoint, chosen.exact.pytorch.answers
        prompts = [prompt[:LONG_PROMPT] for prompt in answers.prompts[:3]]
        long = past_the_window(chosen.own, answers.rows[0], checkpoint.max_length)
        room = max(map(len, [long, *prompts])) + STEPS
        caches, vocabulary = chosen.exact.fused.exported.caches, vocabulary_of(checkpoint.model)
        geometry = geometry_of(caches, 1 + len(prompts), room, vocabulary, self.engine.cache_type)
        executor = judging(chosen.own, spec.build_threads, is_mapped(chosen.own, True))(geometry)
        recorder = Recorder(executor)
        drive(executor, prompts, long)
        graph = self.engine.replayed(chosen.own, chosen.graph)
        return recorder.case(graph.path.name, [graph], spec.build_threads, remote=not self._in_process)

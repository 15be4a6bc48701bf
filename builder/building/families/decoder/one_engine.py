"""Stages of a decoder on one engine, from the export to the entries of the repository.

The packages of the engines build their own form of the graph (builder/engines/decoding.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from builder.building.families import GRAPHS, MAPPED, UNTIMED, Fp32Judging, Result, code_not_run
from builder.building.families.decoder.judging import FP32, DecoderJudge
from builder.building.families.decoder.outputs import FusedDecoder, PyTorchDecoder, SelectedDecoder, VerifiedDecoder
from builder.building.families.generating import (
    generation_serving,
    inputs_left_out,
    limits_of_states,
    measured_pytorch,
    needing_cpus,
    not_as_stored,
    parity_bounds,
    precisions,
    quantised_parts,
    report_of,
    rounded_experts,
    vocabulary_of,
)
from builder.building.variants import timing
from builder.building.variants.generating import PrecisionCandidates, Required
from builder.building.variants.selection import select
from builder.building.verify.generation import (
    TOLERANCE,
    geometry_of,
    make_reference,
    refuse_wrong_probabilities,
    refuse_wrong_text,
)
from builder.building.verify.hidden_states import refuse_wrong_states
from builder.building.verify.long_rows import ask_long_row, unreached
from builder.building.verify.recording import STEPS, Case, Recorder, drive, past_the_window
from builder.building.verify.runtimes import Replay
from builder.checkpoints.chat_template import chat_template, part_roles, thinking, tool_parser, tool_template
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.drafts.loading import HiddenStatesDraft
from builder.checkpoints.generation_config import generation_file, total_length
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import SpecError, VerificationError
from builder.common.memory import ReservedMemory
from builder.common.progress import Stage
from builder.common.workplace import require_disk_space
from builder.engines.decoding import DecodingEngine, Lowered, free_executors, is_mapped, opened
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.graphs.export.experts import cost_of_experts
from builder.graphs.export.lora import AdapterCapacity
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.layout.generating import lay_out_generating
from builder.repository.report.record import BuildReport
from builder.repository.verdict import Comparison, ParityBound
from builder.runtime.adapter_files import ADAPTER
from builder.runtime.contract import Arena, Chat, GenerationServing, LayerShape
from builder.runtime.fields import Field

OTHER_START = (
    "its positions start at {first}, as it was trained; transformers' generate counts from 0, which makes other texts"
)
REPLAYED_PROMPT_TOKENS = 24  # tokens of the prompts that are run on the engine of the release too


@dataclass(frozen=True)
class Decoder:
    """Stages of a decoder on `engine`, judged on token rows: `rows`. `layers`: the cache of each layer.

    `draft`: the draft that reads its hidden states, if --draft is one.
    """

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path
    engine: DecodingEngine
    memory: ReservedMemory
    layers: tuple[LayerShape, ...]
    rows: tuple[tuple[int, ...], ...]
    draft: HiddenStatesDraft | None = None

    def export(self) -> DecoderExport:
        """Return one graph for prefill and decode steps. Raises RepositoryError if the disk is too full for it."""
        require_disk_space(self.memory.weights, GRAPHS)
        adapters = AdapterCapacity.of(self.spec) if self.spec.adapters else None
        states = None if self.draft is None else self.draft.layers.states
        return export_decoder(
            self.checkpoint.model, self.folder, self.checkpoint.max_length, self.layers, adapters, states
        )

    def reference(self, exported: DecoderExport) -> PyTorchDecoder:
        """Return teacher-forced probabilities, those of a long row, and the time of a step."""
        model = self.checkpoint.model
        answers, long = make_reference(model, self.rows), ask_long_row(model, self.checkpoint.max_length)
        latency = timing.pytorch_decoder_latencies(model, self.spec.build_threads) if self.engine.timed else {}
        return PyTorchDecoder(answers, long, measured_pytorch(self.memory, latency, answers.perplexity))

    def fuse(self, exported: DecoderExport) -> FusedDecoder:
        """Return the fused graph. Raises an error if the release's engine cannot run it."""
        return FusedDecoder(exported, self.engine.fuse(exported.graph, self.folder))

    def verify(self, fused: FusedDecoder, reference: PyTorchDecoder) -> VerifiedDecoder:
        """Compare probabilities, then a row past every window, then hidden states for a draft, then greedy texts.

        The texts come last, when no engine has its weights open.
        """
        mapped = self._fp32.is_mapped(fused.graph)
        measured, agreement, long_error = self._judge(fused, reference).measure_fp32(mapped)
        if self.draft is not None:
            self._refuse_wrong_states(fused.graph, self.draft, reference.answers.rows[0], mapped)
        free_executors(fused.graph)
        refuse_wrong_text(self.checkpoint.model, reference.answers, agreement)
        return VerifiedDecoder(fused, reference, measured, long_error, mapped)

    def select(self, exact: VerifiedDecoder, stage: Stage) -> SelectedDecoder:
        """Choose the precision, requested or fastest within the quality; then the cache; then the release's form."""
        if (other := self._otherwise(exact.fused)) is not None:
            return other.select(exact, stage)
        exact, checkpoint = self._judged_as_served(exact, stage), self.checkpoint
        pytorch, judge = exact.pytorch.measured, self._judge(exact.fused, exact.pytorch)
        candidates = PrecisionCandidates(
            pytorch,
            (exact.measured, exact.fused.exact),
            self._required,
            checkpoint.task.metric,
            make=lambda precision: self.engine.lower(exact.fused.graph, precision, self.folder, checkpoint.grids),
            timed=lambda precision, lowered: judge.time(self.engine.variant_name(precision), lowered),
            judged=lambda measured, lowered: judge.compare(measured, lowered)[0],
            graphs=lambda lowered: (lowered.graph, lowered.judged),
        )
        selection = select(candidates, self._precisions, stage)
        measured, lowered = selection.chosen.measured, candidates.variant(selection.chosen.option)
        graph = lowered.graph
        variants = (pytorch, exact.measured, *(one for one in selection.tried if one is not exact.measured))
        if self.spec.cache != "fp32":
            name = f"{measured.name}, {self.spec.cache} cache"
            with stage(name):
                graph = self.engine.shrink_cache(graph, judge.largest_values, self.folder)
                measured, _ = judge.measure(name, Lowered(graph, graph, self.engine.cache_type))
            variants = (*variants, measured)
            if not self._required.keeps(measured, pytorch):
                raise VerificationError(self._required.refusal(measured, pytorch, checkpoint.task.metric))
        own, served = self.engine.for_release(graph, self.folder)
        is_cacheable = self._fp32.is_final(exact.mapped)
        return SelectedDecoder(exact, own, served, variants, measured, lowered.quantised, selection, is_cacheable)

    def replay(self, choice: SelectedDecoder) -> Replay:
        """Return calls with rows in pieces, past the windows and together."""
        if (other := self._otherwise(choice.exact.fused)) is not None:
            return other.replay(choice)
        return Replay(choice.own.engine, self._in_process, lambda: [self._case(choice)])

    def result(self, choice: SelectedDecoder, stage: Stage) -> Result:
        """Return the decode loop with its graph inside or, for BLS, beside it."""
        if (other := self._otherwise(choice.exact.fused)) is not None:
            return other.result(choice, stage)
        checkpoint, caches, graph = self.checkpoint, choice.exact.fused.exported.caches, choice.graph
        graphs = [graph, *self.engine.beside(graph, caches, self.folder)]
        serving = needing_cpus(decoder_serving(checkpoint, self.engine, self.memory, graph, caches), self.spec, [graph])
        tokenizer, fields = tokenizer_json(checkpoint.tokenizer), _fields(self.spec, checkpoint)
        inputs = self.engine.step_fields(graph, caches)
        entries = lay_out_generating(self.spec, serving, tokenizer, graphs, fields, inputs)
        exact = choice.exact
        bounds = (
            *parity_bounds(
                self._required, exact.measured, choice.measured, exact.pytorch.measured, checkpoint.task.metric
            ),
            ParityBound("the same on a long row", exact.long_error, at_most=TOLERANCE),
        )
        return Result(entries, Comparison(bounds), self._report(choice, entries))

    def _report(self, choice: SelectedDecoder, entries: Sequence[RepositoryEntry]) -> BuildReport:
        exported, checkpoint, operators = choice.exact.fused.exported, self.checkpoint, choice.graph.operators
        selection = choice.selection
        return report_of(
            self.spec,
            checkpoint,
            choice.graph.engine,
            replace(self.memory, weights=choice.graph.size),
            operators,
            entries,
            attention={
                "fused": operators[self.engine.attention],
                "layers": exported.attentions,
            },
            quantised=quantised_parts(selection.chosen.option, choice.quantised),
            variants=choice.variants,
            samples=len(choice.exact.pytorch.answers.rows),
            warnings=(
                *(() if self.engine.timed else (UNTIMED,)),
                *self.engine.remarks,
                *((MAPPED,) if self.engine.timed and choice.exact.mapped else ()),
                *unreached(checkpoint.model.config, checkpoint.max_length),
                *filter(
                    None,
                    [
                        inputs_left_out(checkpoint),
                        code_not_run(checkpoint),
                        cost_of_experts(checkpoint.model, operators),
                        not_as_stored(self.spec.precision, checkpoint),
                        rounded_experts(choice.quantised),
                        limits_of_states(exported.caches),
                    ],
                ),
                *(f"{name} runs as separate operators, which is right but slower" for name in exported.rotary_left),
                *((OTHER_START.format(first=exported.first_position),) if exported.first_position else ()),
            ),
            choice=selection.choice,
            chosen=choice.measured.name,
        )

    def _otherwise(self, fused: FusedDecoder) -> Decoder | None:
        """Return the stages over another cache if the graph cannot be over the default one; None if it can be.

        Raises SpecError if the device has no memory for it.
        """
        engine = self.engine.over(fused.graph)
        if engine is self.engine:
            return None
        refuse_search(engine.spec, self.checkpoint)
        memory = engine.plan_memory(self.layers, self.memory.weights, self.checkpoint.max_length)
        return replace(self, spec=engine.spec, engine=engine, memory=memory)

    @property
    def _in_process(self) -> bool:
        return self.spec.executor == "in-process"

    @property
    def _precisions(self) -> tuple[str, ...]:
        return precisions(self.spec.precision, self.spec.triton, self._in_process)

    @property
    def _fp32(self) -> Fp32Judging:
        return Fp32Judging(FP32 in self._precisions, self.spec.chooses_by_time, is_mapped)

    @property
    def _required(self) -> Required:
        return Required(self.checkpoint.task.required(self.spec.quality), self.spec.perplexity)

    def _judge(self, fused: FusedDecoder, pytorch: PyTorchDecoder) -> DecoderJudge:
        return DecoderJudge(self.engine, fused, pytorch, vocabulary_of(self.checkpoint.model))

    def _judged_as_served(self, exact: VerifiedDecoder, stage: Stage) -> VerifiedDecoder:
        """Judge and time `exact` anew as served, if this build can and an earlier one judged it from its file."""
        if not self._fp32.is_outdated(exact.mapped, exact.fused.graph):
            return exact
        with stage(f"judge {FP32} as served"):
            measured, agreement = self._judge(exact.fused, exact.pytorch).measure(FP32, exact.fused.exact)
        refuse_wrong_probabilities(agreement.error)
        return replace(exact, measured=measured, mapped=False)

    def _refuse_wrong_states(self, graph: Graph, draft: HiddenStatesDraft, row: Sequence[int], mapped: bool) -> None:
        """Raise VerificationError if `graph` returns other hidden states than PyTorch on `row`."""
        model = self.checkpoint.model
        executors = opened(graph, self.spec.build_threads, mapped)
        executor = executors(geometry_of(self.layers, 1, len(row), vocabulary_of(model)))
        refuse_wrong_states(executor, model, draft.layers.states, row)

    def _case(self, choice: SelectedDecoder) -> Case:
        """Return the answers of `own` in this build's engine, which `graph` must repeat."""
        spec, checkpoint, answers = self.spec, self.checkpoint, choice.exact.pytorch.answers
        prompts = [prompt[:REPLAYED_PROMPT_TOKENS] for prompt in answers.prompts[:3]]
        long = past_the_window(choice.own, answers.rows[0], checkpoint.max_length)
        length = max(map(len, [long, *prompts])) + STEPS
        caches, vocabulary = choice.exact.fused.exported.caches, vocabulary_of(checkpoint.model)
        geometry = geometry_of(caches, 1 + len(prompts), length, vocabulary, self.engine.cache_type)
        executor = opened(choice.own, spec.build_threads, is_mapped(choice.own, True))(geometry)
        recorder = Recorder(executor)
        drive(executor, prompts, long)
        graph = self.engine.replayed(choice.own, choice.graph)
        return recorder.case(graph.path.name, [graph], spec.build_threads, remote=not self._in_process)


def refuse_search(spec: BuildSpec, checkpoint: Checkpoint) -> None:
    """Raise SpecError if a search, of --beams or of the checkpoint's own, needs more slots than there are."""
    config = checkpoint.model.generation_config
    if spec.beams is not None and spec.beams > spec.slots:
        raise SpecError(
            f"a search of {spec.beams} beams needs as many slots, and the GPU has memory for {spec.slots}: lower "
            "--beams or --max-length"
        )
    if spec.beams is None and not config.do_sample and (config.num_beams or 1) > spec.slots:
        raise SpecError(
            f"the checkpoint's {generation_file(checkpoint.folder)} searches with {config.num_beams} beams, which need "
            f"as many slots; --slots is {spec.slots}. Give it more, or say with --beams how many a search is to have"
        )


def _fields(spec: BuildSpec, checkpoint: Checkpoint) -> tuple[Sequence[Field], Sequence[Field]]:
    """Return the inputs and outputs of the front; with --adapters, requests name theirs."""
    inputs, outputs = checkpoint.task.fields({})
    return ((*inputs, ADAPTER) if spec.adapters else inputs), outputs


def decoder_serving(
    checkpoint: Checkpoint, engine: DecodingEngine, memory: ReservedMemory, graph: Graph, caches: Sequence[LayerShape]
) -> GenerationServing:
    """Return the settings, for serving.json, of the emitted loop over `graph`."""
    spec, config = engine.spec, checkpoint.model.generation_config
    in_process, template = spec.executor == "in-process", chat_template(checkpoint.tokenizer)
    return generation_serving(
        spec,
        checkpoint,
        config,
        Arena(spec.slots, checkpoint.max_length, engine.cache_type, caches, engine.blocks(caches, memory)),
        engine.session(),
        spec.beams or spec.slots,
        _fields(spec, checkpoint)[0],
        executor=spec.executor,
        prefill_tokens=spec.prefill_tokens,
        model=graph.path.name if in_process else None,
        copier=engine.copier,
        engine=None if in_process else spec.engine_name,
        inputs=graph.inputs,
        outputs=graph.outputs,
        total_length=total_length(config),
        prefix_cache=spec.serving.prefix_cache,
        chat=None if template is None else _chat(template, checkpoint, spec.serving.tool_parser),
        fill=getattr(checkpoint.tokenizer, "fill_token", None),
    )


def _chat(template: str, checkpoint: Checkpoint, notation: str | None) -> Chat:
    """Return how messages become a prompt. `notation`: of calls of tools, if it was given."""
    tokenizer = checkpoint.tokenizer
    chat = Chat(template, dict(tokenizer.special_tokens_map), tool_template(tokenizer))
    marks = thinking(chat, tokenizer.all_special_tokens)
    return replace(chat, tool_parser=notation or tool_parser(chat), part_roles=part_roles(chat), thinking=marks)

"""Encoders: one graph, one call a batch, and a search over variants of it; their stages, from the export on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from builder.building.families import GRAPHS, Fp32Judging, Result, given_options
from builder.building.families.encoder.results import (
    ExportedEncoder,
    FusedEncoder,
    SelectedEncoder,
    VerifiedEncoder,
    comparison_of,
    report_of,
)
from builder.building.keys import own_files
from builder.building.variants.budget import LabelledJudge, labelled_judge
from builder.building.variants.call_memory import measured_token_bytes
from builder.building.variants.candidates import VariantMaker, requested_variants
from builder.building.variants.encoder import EncoderCandidates, Maker, Measurements, measurements_of
from builder.building.variants.evaluator import Evaluator, make_evaluator
from builder.building.variants.selection import select
from builder.building.variants.timing import pytorch_latencies
from builder.building.verify.parity import TOLERANCE, cause, long_references
from builder.building.verify.quality import SERVED_TOLERANCE
from builder.building.verify.recording import graph_case
from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import CheckpointError, SpecError, VerificationError
from builder.common.machine import cpu
from builder.common.memory import encoder_call, refuse_slots, weights_bytes
from builder.common.progress import Stage
from builder.common.releases import runtime_has
from builder.common.workplace import require_disk_space
from builder.engines import graph_engine, graph_engines, stays_in_file
from builder.engines.encoding import Variant, encoding_engine
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime import BACKEND
from builder.engines.optimise.compaction import compact
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.pruning import prune
from builder.graphs.export.encoder import export, task_graph
from builder.graphs.export.lora import AdapterCapacity
from builder.graphs.export.rows import rows_of
from builder.graphs.onnx.bands import repeat_biases
from builder.graphs.onnx.experts import run_all_experts
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import BIAS_FOR_ALL_HEADS_NEED, EXPERTS_NEED
from builder.options import BuildSpec
from builder.repository.layout.encoder import bucketed, lay_out
from builder.repository.report.record import MeasuredVariant, package_versions

EXACT_LEVEL = "O2"  # the highest level whose rewrites leave every value as it is


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Encoder:
    """Return the stages of an encoder.

    Raises SpecError for an option that encoders do not have, CheckpointError for a model of several parts or of bytes.
    """
    of_loops = ("--beams", "--max-answer", "--cache-gb", "--draft")
    generating = (*of_loops, "serving.tool_parser", "serving.batch_dimension")
    given = given_options(spec, *generating)
    if given:
        raise SpecError(f"{given[0]} is for models that generate; {checkpoint.task.name} does not")
    if spec.late_chunking and not encoder_task(checkpoint.task).has_late_chunking:
        raise SpecError(f"--late-chunking is for embeddings of one vector a text; {checkpoint.task.name} has none")
    if spec.serving.dynamo and not encoder_task(checkpoint.task).has_class_scores:
        raise SpecError(f"serving.dynamo is for text-classification; {checkpoint.task.name} has no scores of classes")
    refuse_without_process(spec)
    _refuse_composed(checkpoint)
    variants = tuple(requested_variants(spec, cpu()["flags"]))
    if spec.adapters:
        _refuse_adapters(spec, checkpoint, variants)
    given = own_files(None, spec.graph)["graph"]
    return Encoder(spec, checkpoint, folder, variants, labelled_judge(spec, checkpoint), given)


def refuse_without_process(spec: BuildSpec) -> None:
    """Raise SpecError for an option that an engine in the front's own process does not have."""
    if not spec.in_process:
        if spec.executor == "in-process" and "executor" in spec.model_fields_set:
            raise SpecError("on a GPU an encoder's engine is a Triton model of its own: leave --executor out")
        return
    if spec.serving.front_instances not in (None, spec.instances):
        raise SpecError(
            "serving.front_instances: in process each front has an engine of its own, so --instances sets both; "
            "leave it out, or use --executor bls"
        )
    if spec.serving.optimization_level:
        raise SpecError("serving.optimization_level is for Triton's own backends: leave it out, or use --executor bls")


def _refuse_adapters(spec: BuildSpec, checkpoint: Checkpoint, variants: Sequence[Variant]) -> None:
    """Raise SpecError for --adapters with a task, an engine or another option that has none, or for too many."""
    if not encoder_task(checkpoint.task).takes_adapters:
        raise SpecError(
            "--adapters is for text generation, embeddings, rerankers, and classification of texts and tokens; "
            f"{checkpoint.task.name} takes none"
        )
    if spec.adapter_labels and "labels" not in encoder_task(checkpoint.task).parameters(checkpoint):
        raise SpecError(f"--adapter-labels is for classification; {checkpoint.task.name} has no labels: leave it out")
    others = {
        "--graph": spec.graph is not None,
        f"--level {spec.level}": spec.level > EXACT_LEVEL,  # adapters are compared with PyTorch digit by digit
        "--prune": spec.prune is not None,
        "--late-chunking": spec.late_chunking,
        "serving.dynamo": spec.serving.dynamo,  # whose labels are those of the model, not of its adapters
        "serving.response_cache": spec.serving.response_cache,  # an adapter may be replaced by another of its name
    }
    for option in (name for name, is_given in others.items() if is_given):
        raise SpecError(f"--adapters does not go with {option}: leave one out")
    able = [one.name for one in graph_engines() if one.encoding is not None and one.encoding.takes_adapters]
    if not spec.in_process or any(one.engine not in able or one.precision != "fp32" for one in variants):
        engines = ", ".join(f"--engine {name}" for name in able)
        raise SpecError(f"--adapters of an encoder is for {engines} with --precision fp32, in process on the CPU")
    refuse_slots(
        AdapterCapacity.of(spec).bytes(checkpoint.model) * spec.instances,
        spec.usable_memory,
        "the adapters need",
        f"{spec.adapters} of rank {spec.adapter_rank} in each of {spec.instances} instances",
        "--adapters, --adapter-rank or --instances",
    )


def _refuse_composed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model of several parts or of bytes: its configuration has no layers or no tokens."""
    missing = [name for name in ("num_hidden_layers", "vocab_size") if not hasattr(checkpoint.config, name)]
    if missing:
        raise CheckpointError(
            f"{checkpoint.config.model_type} cannot be served for {checkpoint.task.name}: its config.json has no "
            f"{missing[0]}. Models of several parts (an image or audio encoder beside the text's) and models of bytes "
            "are not supported; a checkpoint of the text part alone may be"
        )


@dataclass(frozen=True)
class Encoder:
    """Stages of an encoder; `variants`: those that its options allow; `labelled`: judge of --budget.

    `given`: SHA-256 of the files of --graph, by name, from before they are read.
    """

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path
    variants: tuple[Variant, ...]
    labelled: LabelledJudge | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    def export(self) -> ExportedEncoder:
        """Export the graph, after the model has answered the long rows, which must be its first.

        Raises RepositoryError if the disk is too full for the graph.
        """
        checkpoint, module = self.checkpoint, task_graph(self.checkpoint)
        require_disk_space(weights_bytes(module), GRAPHS)
        long = long_references(module, rows_of(checkpoint), checkpoint.max_length)
        begin_alike = self.spec.target == "cpu" and encoder_task(checkpoint.task).rows_begin_alike
        begin_alike = begin_alike and self._adapters is None  # one beginning would be for one adapter
        return ExportedEncoder(export(checkpoint, self.folder, begin_alike, self._adapters), long)

    def reference(self, exported: ExportedEncoder) -> MeasuredVariant:
        """Measure PyTorch; its answers to the samples come once the front that reads them exists."""
        latency, checkpoint, module = {}, self.checkpoint, exported.export.module
        if self.spec.target == "cpu":
            rows = rows_of(checkpoint)
            latency = pytorch_latencies(module, rows, checkpoint.max_length, self.spec.build_threads)
        return MeasuredVariant("PyTorch fp32", weights_bytes(module), latency, 0.0, 1.0, 1.0, 1.0)

    def fuse(self, exported: ExportedEncoder) -> FusedEncoder:
        """Compact the graph, then fuse it at the highest level that leaves every value as it is.

        Engines without the operator that reads the chosen experts alone run all of them; those in which heads do not
        share a bias get one for each.
        """
        graph, empty = exported.export.graph, None
        if self._adapters is None:  # which may change what the checkpoint leaves empty
            graph, empty = compact(graph, self.folder)
        if not (self.spec.target == "cpu" and self._runtime_has(EXPERTS_NEED)):
            graph = run_all_experts(graph, self.folder)
        if not self._runtime_has(BIAS_FOR_ALL_HEADS_NEED):
            graph = repeat_biases(graph, self.folder)
        return FusedEncoder(exported, graph, fuse(graph, self.folder, min(self.spec.level, EXACT_LEVEL)), empty)

    def _runtime_has(self, need: str) -> bool:
        """Return True if the ONNX Runtime that serves has the feature `need`."""
        return runtime_has(need, self.spec.triton, self.spec.in_process)

    def verify(self, fused: FusedEncoder, reference: MeasuredVariant) -> VerifiedEncoder:
        """Compare number by number, then the served answers.

        Raises VerificationError with the cause, if one is known.
        """
        spec, exported = self.spec, fused.exported
        module, shares = exported.export.module, exported.export.shares_prefixes
        evaluator = make_evaluator(spec, self.checkpoint, module, fused.graph, self.folder, shares)
        level = f"{spec.level} " if spec.level < EXACT_LEVEL else ""
        name = f"{level}{'' if fused.empty is None else 'compacted '}fp32"
        return _judged(name, fused, evaluator, reference, self._fp32.is_mapped(fused.graph))

    def select(self, exact: VerifiedEncoder, stage: Stage) -> SelectedEncoder:
        """Choose, from PyTorch and the exact graph on, the fastest variant that keeps the requested quality."""
        exact = self._judged_on_more(self._judged_as_served(self._with_front(exact), stage), stage)
        exact = self._judged_on_labels(exact, stage)
        spec, evaluator, fused = self.spec, exact.evaluator, exact.fused
        graph, pruned = fused.compacted, None
        if spec.prune is not None:
            with stage("prune"):
                graph, pruned = prune(graph, fused.exported.export.module, spec.prune, evaluator.feeds, self.folder)
        scores = evaluator.reference_scores if self.labelled is None else self.labelled.scores
        pytorch = replace(exact.pytorch, scores=dict(scores))
        as_verified = fused.graph if pruned is None and spec.level <= EXACT_LEVEL else None
        maker = self._maker(graph, evaluator, as_verified)
        allowance = evaluator.allowance
        threshold = self.checkpoint.task.required(spec.quality) if allowance is None else allowance.share
        known = measurements_of(self._facts(evaluator)) if len(self.variants) > 1 else Measurements()
        verified = (exact.measured, exact.quality)
        prefix, compares_times = self._prefix(exact.measured), len(self.variants) > 1
        candidates = EncoderCandidates(
            evaluator, maker, pytorch, verified, threshold, known, prefix, compares_times, self.labelled
        )
        selection = select(candidates, self.variants, stage)
        chosen = selection.chosen
        quantised = candidates.variant(chosen.option, chosen.left_alone)
        if spec.target != "cpu":
            weights = f"the weights of {spec.instances} instances"
            size = quantised.graph.size * spec.instances
            refuse_size(spec.gpu, size, weights, "use fewer --instances", spec.in_process)
        variants = (pytorch, exact.measured, *(one for one in selection.tried if one.name != exact.measured.name))
        quality, is_cacheable = candidates.qualities[chosen.measured.name], self._fp32.is_final(exact.mapped)
        return SelectedEncoder(exact, selection, quantised, quality, variants, threshold, pruned, is_cacheable)

    def _maker(self, graph: Graph, evaluator: Evaluator, as_verified: Graph | None) -> Maker:
        """Return the maker of the variants of `graph`; `as_verified`: fused, if it is in its verified form."""
        return VariantMaker(self.spec, graph, self.folder, evaluator.feeds, as_verified)

    def _prefix(self, exact: MeasuredVariant) -> str:
        """Return the prefix of the names of all variants."""
        prefix = f"{self.spec.level} " if self.spec.level > EXACT_LEVEL else ""
        pruned = "" if self.spec.prune is None else f"pruned {self.spec.prune:.0%} "
        return prefix + exact.name.removesuffix("fp32") + pruned

    def _facts(self, evaluator: Evaluator) -> dict[str, object]:
        """Return all that a measurement of a variant depends on."""
        spec = self.spec
        apart = {"name", "output", "store", "precision", "engine", "quality", "budget", "data", "load"}
        return {
            "checkpoint": self.checkpoint.identity(),
            "spec": spec.model_dump(mode="json", exclude=apart),
            "files": own_files(None, spec.graph, spec.data),
            "samples": [evaluator.samples, evaluator.labels],
            "feeds": [{name: values.tolist() for name, values in feed.items()} for feed in evaluator.feeds],
            "versions": package_versions(),
            "cpu": cpu(),
        }

    def replay(self, chosen: SelectedEncoder) -> Replay:
        """Return the engine's calls on the samples."""
        graph, feeds, threads = chosen.graph, chosen.exact.evaluator.feeds, self.spec.build_threads
        return Replay(graph.engine, self.spec.in_process, lambda: [graph_case(graph, feeds, threads)])

    def result(self, choice: SelectedEncoder, stage: Stage) -> Result:
        """Return the front model with its engine inside or beside it, or the recipe from which a GPU compiles that.

        Raises SpecError if --graph changed since it was read.
        """
        if own_files(None, self.spec.graph)["graph"] != self.given:
            raise SpecError(f"--graph {self.spec.graph} changed while it was verified: build again")
        evaluator, graph, options = self._with_front(choice.exact).evaluator, choice.graph, self.spec
        engine, serving = encoding_engine(graph.engine), evaluator.serving
        if options.target == "cpu":
            serving = replace(serving, needs_cpus_with=graph_engine(graph.engine).needed_cpus(graph))
        files = engine.files(graph, options, serving, evaluator.feeds, self.folder, stage)
        entries = lay_out(
            options,
            serving,
            evaluator.tokenizer,
            graph,
            files,
            evaluator.fields,
            evaluator.warm_up_rows(),
            evaluator.task_files,
        )
        memory = self._memory(evaluator, graph) if options.target == "cpu" else None
        report = report_of(options, self.checkpoint, choice, entries, memory, self.given)
        return Result(entries, comparison_of(choice), report)

    def _memory(self, evaluator: Evaluator, graph: Graph) -> dict[str, int]:
        """Return the bytes of an instance that serves `graph`: its weights, and its largest call."""
        batching, length = bucketed(evaluator.serving, graph).batching, self.checkpoint.max_length
        token = measured_token_bytes(evaluator.opened(graph), graph.token_inputs, evaluator.rows, batching, length)
        memory = {"weights": graph.size, "activations": token * encoder_call(batching.token_budget, length)}
        if self._adapters is not None:
            memory["adapters"] = self._adapters.bytes(self.checkpoint.model)
        return memory

    @property
    def _adapters(self) -> AdapterCapacity | None:
        return AdapterCapacity.of(self.spec) if self.spec.adapters else None

    def _with_front(self, exact: VerifiedEncoder) -> VerifiedEncoder:
        """Return `exact` with the front of this specification, if an earlier one's verified the graph."""
        return replace(exact, evaluator=exact.evaluator.serving_as(self.spec, exact.fused.graph))

    def _judged_as_served(self, exact: VerifiedEncoder, stage: Stage) -> VerifiedEncoder:
        """Judge and time `exact` anew as served, if this build can and an earlier one judged it from its file."""
        if not self._fp32.is_outdated(exact.mapped, exact.fused.graph):
            return exact
        with stage(f"judge {exact.measured.name} as served"):
            return _judged(exact.measured.name, exact.fused, exact.evaluator, exact.pytorch, mapped=False)

    def _judged_on_more(self, exact: VerifiedEncoder, stage: Stage) -> VerifiedEncoder:
        """Return `exact`, judged on further samples if a variant that rounds may be served."""
        evaluator = exact.evaluator
        if all(variant.precision == "fp32" for variant in self.variants) and self.spec.prune is None:
            return exact
        with stage("answers to more samples"):
            evaluator = evaluator.on_more_samples()
            if evaluator is exact.evaluator:
                return exact
            graph = exact.fused.graph
            measured, quality = evaluator.judged(exact.measured, graph, evaluator.opened(graph, exact.mapped))
        return replace(exact, evaluator=evaluator, measured=measured, quality=quality)

    def _judged_on_labels(self, exact: VerifiedEncoder, stage: Stage) -> VerifiedEncoder:
        """Return `exact`, judged on the data of --budget too, with what that allows. Raises SpecError."""
        if self.labelled is None:
            return exact
        name = self.labelled.data["name"]
        with stage(f"PyTorch's answers to {name}"):
            allowance = self.labelled.allowance()
        with stage(str(allowance)):
            evaluator, graph = replace(exact.evaluator, allowance=allowance), exact.fused.graph
            infer = evaluator.opened(graph, exact.mapped)
            answers = evaluator.answers(graph, infer, self.labelled.requests, name)
            return replace(exact, evaluator=evaluator, measured=self.labelled.judged(exact.measured, answers))

    @property
    def _fp32(self) -> Fp32Judging:
        return Fp32Judging(
            any(variant.precision == "fp32" and variant.engine == BACKEND for variant in self.variants),
            self.spec.chooses_by_time,
            lambda graph, is_served: stays_in_file(graph.size, is_served),
        )


def _judged(
    name: str, fused: FusedEncoder, evaluator: Evaluator, pytorch: MeasuredVariant, mapped: bool
) -> VerifiedEncoder:
    """Measure the fused graph in every way. Raises VerificationError if it answers differently from PyTorch."""
    measured, quality = evaluator.measure(name, fused.graph, fused.exported.long, mapped)
    exact = VerifiedEncoder(fused, evaluator, pytorch, measured, quality, mapped)
    if exact.error > TOLERANCE:
        problem = (
            f"the fused graph is off by {exact.error:.1e} of PyTorch's largest output; at most {TOLERANCE:.0e} is right"
        )
    elif quality.error > SERVED_TOLERANCE:
        problem = f"the served answer is not transformers' answer ({quality.where}, off by {quality.error:.1e})"
    else:
        return exact
    why = cause(fused.graph, evaluator.module, evaluator.rows, evaluator.checkpoint, evaluator.spec.build_threads)
    raise VerificationError(f"{problem}. Nothing was published: {why}")

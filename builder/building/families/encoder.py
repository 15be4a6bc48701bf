"""Encoders: one graph, one call a batch, and a search over variants of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from builder.building.families import GRAPHS, MAPPED, UNTIMED, Family, built_from, code_not_run
from builder.building.keys import own_files
from builder.building.variants.candidates import VariantMaker, requested_variants
from builder.building.variants.encoder import ROUNDING, EncoderCandidates
from builder.building.variants.evaluator import Evaluator, make_evaluator
from builder.building.variants.latency import pytorch_latencies
from builder.building.variants.measurements import Measurements, measurements_of
from builder.building.variants.selection import Selection, select
from builder.building.verify.causes import cause
from builder.building.verify.parity import TOLERANCE, Reference, long_references
from builder.building.verify.quality import Quality
from builder.building.verify.recording import graph_case
from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint
from builder.common.cpu import cpu
from builder.common.errors import CheckpointError, SpecError, VerificationError
from builder.common.memory import weights_bytes
from builder.common.progress import Stage
from builder.common.workplace import refuse_without_room
from builder.engines import left_in_file, refuse_to_choose
from builder.engines.encoding import Variant, encoding_engine
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime import BACKEND
from builder.engines.optimise.compaction import Removed, compact
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.pruning import prune
from builder.engines.optimise.quantised import Quantised
from builder.graphs.export.encoder import Export, export, task_graph
from builder.graphs.export.experts import cost_of_experts
from builder.graphs.export.rows import rows_of
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import FUSED
from builder.options import BuildSpec, LayoutOptions
from builder.repository.config.entries import RepositoryEntry
from builder.repository.layout.encoder import lay_out
from builder.repository.report.provenance import file_hashes, versions
from builder.repository.report.record import BuildReport, EngineCheck, MeasuredVariant
from builder.repository.verdict import Comparison, ParityBound

SERVED_TOLERANCE = 1e-3  # fp32 answers against the pipeline's, whose own batches differ in the last digits
EXACT_LEVEL = "O2"  # the highest level whose rewrites leave every value as it is


@dataclass(frozen=True)
class Exported:
    """Export, with PyTorch's answers to long rows from before it."""

    export: Export
    long: tuple[Reference, ...]


@dataclass(frozen=True)
class Fused:
    """Graph without operators that do nothing, and its fused form."""

    exported: Exported
    compacted: Graph
    graph: Graph
    empty: Removed | None


@dataclass(frozen=True)
class Exact:
    """Fused graph whose answers equal the reference's.

    `mapped`: the graph was judged and timed with its weights left in their file, otherwise than it is served.
    """

    fused: Fused
    evaluator: Evaluator
    pytorch: MeasuredVariant
    measured: MeasuredVariant
    quality: Quality
    mapped: bool


@dataclass(frozen=True)
class Chosen:
    """Variant that is served, of those that were measured."""

    exact: Exact
    selection: Selection[Variant]
    quantised: Quantised
    quality: Quality
    variants: tuple[MeasuredVariant, ...]
    threshold: float
    pruned: Removed | None

    @property
    def graph(self) -> Graph:
        return self.quantised.graph


def begin(
    spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage
) -> Family[Exported, MeasuredVariant, Fused, Exact, Chosen]:
    """Return the steps of an encoder.

    Raises SpecError for an option that it does not have, CheckpointError for a model of several parts or of bytes.
    """
    generating = {
        "--beams": spec.beams,
        "--max-answer": spec.max_answer,
        "--cache-gb": spec.cache_gb,
        "--draft": spec.draft,
        "serving.tool_parser": spec.serving.tool_parser,
        "serving.batch_dimension": spec.serving.batch_dimension or None,
    }
    stated = [name for name, value in generating.items() if value is not None]
    if stated:
        raise SpecError(f"{stated[0]} is for models that generate; {checkpoint.task.name} does not")
    refuse_without_process(spec.layout, "executor" in spec.model_fields_set)
    _refuse_composed(checkpoint)
    return Encoder(spec, checkpoint, folder, tuple(requested_variants(spec, cpu()["flags"])))


@dataclass(frozen=True)
class Encoder:
    """Steps of an encoder, over `variants` of one graph."""

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path
    variants: tuple[Variant, ...]

    def export(self) -> Exported:
        """Export the graph, after the model's answers to the long rows: its first answers.

        Raises RepositoryError where the disk has no room for the graph.
        """
        checkpoint = self.checkpoint
        refuse_without_room(weights_bytes(checkpoint.model), GRAPHS)
        long = long_references(task_graph(checkpoint), rows_of(checkpoint), checkpoint.max_length)
        return Exported(export(checkpoint, self.folder), long)

    def reference(self, exported: Exported) -> MeasuredVariant:
        """Measure PyTorch; its answers to the samples come once the front that reads them exists."""
        latency, checkpoint = {}, self.checkpoint
        if self.spec.target == "cpu":
            module, rows = exported.export.module, rows_of(checkpoint)
            latency = pytorch_latencies(module, rows, checkpoint.max_length, self.spec.build_threads)
        return MeasuredVariant("PyTorch fp32", weights_bytes(checkpoint.model), latency, 0.0, 1.0, 1.0, 1.0)

    def fuse(self, exported: Exported) -> Fused:
        """Compact the graph, then fuse it at the highest level that leaves every value as it is."""
        graph, empty = compact(exported.export.graph, self.folder)
        return Fused(exported, graph, fuse(graph, self.folder, min(self.spec.level, EXACT_LEVEL)), empty)

    def verify(self, fused: Fused, reference: MeasuredVariant) -> Exact:
        """Compare number by number, then the served answers.

        Raises VerificationError with the cause, where one is known.
        """
        spec, exported = self.spec, fused.exported
        evaluator = make_evaluator(spec, self.checkpoint, exported.export.module, fused.graph, self.folder)
        level = f"{spec.level} " if spec.level < EXACT_LEVEL else ""
        name = f"{level}{'' if fused.empty is None else 'compacted '}fp32"
        return _judged(name, fused, evaluator, reference, self._mapped(fused.graph))

    def select(self, exact: Exact, stage: Stage) -> Chosen:
        """Choose, from PyTorch and the exact graph on, the fastest variant that keeps the requested quality."""
        exact = self._judged_on_more(self._judged_as_served(self._as_served(exact), stage), stage)
        spec, evaluator, fused = self.spec, exact.evaluator, exact.fused
        graph, pruned = fused.compacted, None
        if spec.prune is not None:
            with stage("prune"):
                graph, pruned = prune(graph, fused.exported.export.module, spec.prune, evaluator.feeds, self.folder)
        pytorch = replace(exact.pytorch, scores=dict(evaluator.reference_scores))
        as_verified = fused.graph if pruned is None and spec.level <= EXACT_LEVEL else None
        maker = VariantMaker(spec, graph, self.folder, evaluator.feeds, as_verified)
        threshold = self.checkpoint.task.required(spec.quality)
        known = measurements_of(self._facts(evaluator)) if len(self.variants) > 1 else Measurements()
        verified = (exact.measured, exact.quality)
        candidates = EncoderCandidates(
            evaluator, maker, pytorch, verified, threshold, known, self._prefix(exact.measured)
        )
        selection = select(candidates, self.variants, stage)
        chosen = selection.chosen
        quantised = candidates.variant(chosen.option, chosen.left_alone)
        if spec.target != "cpu":
            weights = f"the weights of {spec.instances} instances"
            refuse_size(spec.gpu, quantised.graph.size * spec.instances, weights, "use fewer --instances")
        variants = (pytorch, exact.measured, *(one for one in selection.tried if one.name != exact.measured.name))
        return Chosen(
            exact, selection, quantised, candidates.qualities[chosen.measured.name], variants, threshold, pruned
        )

    def _prefix(self, exact: MeasuredVariant) -> str:
        """Return the prefix of the names of all variants."""
        prefix = f"{self.spec.level} " if self.spec.level > EXACT_LEVEL else ""
        pruned = "" if self.spec.prune is None else f"pruned {self.spec.prune:.0%} "
        return prefix + exact.name.removesuffix("fp32") + pruned

    def _facts(self, evaluator: Evaluator) -> dict[str, object]:
        """Return all that a measurement of a variant depends on."""
        spec = self.spec
        apart = {"name", "output", "store", "precision", "engine", "quality", "load"}
        return {
            "checkpoint": self.checkpoint.identity(),
            "spec": spec.model_dump(mode="json", exclude=apart),
            "graph": own_files(spec.samples, spec.graph)["graph"],
            "samples": [evaluator.samples, evaluator.labels],
            "feeds": [{name: values.tolist() for name, values in feed.items()} for feed in evaluator.feeds],
            "versions": versions(),
            "cpu": cpu(),
        }

    def lasts(self, chosen: Chosen) -> bool:
        """Return False if fp32 may be served and was not judged as served: the next build may have the memory."""
        return not (chosen.exact.mapped and self._serves_fp32)

    def replay(self, chosen: Chosen) -> Replay:
        """Return the engine's calls on the samples."""
        graph, feeds, threads = chosen.graph, chosen.exact.evaluator.feeds, self.spec.build_threads
        return Replay(graph.engine, self.spec.in_process, lambda: [graph_case(graph, feeds, threads)])

    def lay_out(self, chosen: Chosen, stage: Stage) -> tuple[RepositoryEntry, ...]:
        """Return the front model with its engine inside or beside it, or the recipe from which a GPU compiles that."""
        evaluator, graph, options = self._as_served(chosen.exact).evaluator, chosen.graph, self.spec.layout
        engine = encoding_engine(graph.engine)
        files = engine.files(graph, options, evaluator.serving, evaluator.feeds, self.folder, stage)
        return lay_out(
            options,
            evaluator.serving,
            evaluator.tokenizer,
            graph,
            files,
            evaluator.fields,
            evaluator.warm_up_rows(),
        )

    def _as_served(self, exact: Exact) -> Exact:
        """Return `exact` with the front of this specification, if an earlier one's verified the graph."""
        return replace(exact, evaluator=exact.evaluator.serving_as(self.spec.front, exact.fused.graph))

    def _judged_as_served(self, exact: Exact, stage: Stage) -> Exact:
        """Judge and time `exact` anew as served, if this build can and an earlier one judged it from its file."""
        graph = exact.fused.graph
        if not exact.mapped or not self._serves_fp32 or self._mapped(graph):
            return exact
        with stage(f"judge {exact.measured.name} as served"):
            return _judged(exact.measured.name, exact.fused, exact.evaluator, exact.pytorch, mapped=False)

    def _judged_on_more(self, exact: Exact, stage: Stage) -> Exact:
        """Return `exact` judged on further samples, where a variant may be served that rounds."""
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

    def _mapped(self, graph: Graph) -> bool:
        """Return True if it is judged over its file.

        Raises BuilderError if it is to be chosen by its time as served.
        """
        mapped = left_in_file(graph.size, self._serves_fp32)
        if mapped and self._serves_fp32 and self.spec.chooses_by_time:
            refuse_to_choose(graph.size)
        return mapped

    @property
    def _serves_fp32(self) -> bool:
        """Return True if the fused graph itself may be served."""
        return any(variant.precision == "fp32" and variant.engine == BACKEND for variant in self.variants)

    def comparison(self, chosen: Chosen) -> Comparison:
        """Compare the fused graph number by number and as it is served; then the variant by its quality."""
        exact = chosen.exact
        quality = exact.evaluator.relative_quality(chosen.selection.chosen.measured)
        return Comparison(
            (
                ParityBound("the error of the fused graph", _error(exact.measured), at_most=TOLERANCE),
                ParityBound("the error of the answers in fp32", exact.quality.error, at_most=SERVED_TOLERANCE),
                ParityBound(f"the {exact.evaluator.metric}", quality, at_least=chosen.threshold - ROUNDING),
            )
        )

    def report(
        self, chosen: Chosen, entries: Sequence[RepositoryEntry], checks: tuple[EngineCheck, ...]
    ) -> BuildReport:
        exact, selection = chosen.exact, chosen.selection
        exported, evaluator, operators = exact.fused.exported.export, exact.evaluator, chosen.graph.operators
        untimed = None if self.spec.target == "cpu" else UNTIMED
        mapped = MAPPED if exact.mapped and untimed is None else None
        own, cost = code_not_run(self.checkpoint), cost_of_experts(self.checkpoint.model)
        warnings = (own, exported.warning, cost, _calls(evaluator), untimed, mapped)
        removed = {"empty": exact.fused.empty, "pruned": chosen.pruned}
        return BuildReport(
            **built_from(self.spec.layout, self.spec.samples, self.checkpoint),
            attention={"fused": exported.attentions, "layers": exported.layers},
            operators={name: operators[name] for name in FUSED if operators[name]},
            quantised=_quantised(chosen.quantised),
            removed={name: asdict(units) for name, units in removed.items() if units is not None},
            variants=chosen.variants,
            metric=self.checkpoint.task.metric,
            gate=evaluator.metric,
            threshold=chosen.threshold,
            samples=len(evaluator.samples),
            padding=chosen.quality.padding,
            warnings=tuple(filter(None, warnings)),
            choice=selection.choice,
            chosen=selection.chosen.measured.name,
            engine=chosen.graph.engine,
            tuned_for=tuple(flag for flag in selection.chosen.option.fast_with if flag in cpu()["flags"]),
            files=file_hashes(entries),
            verified_on=checks,
        )


def _judged(name: str, fused: Fused, evaluator: Evaluator, pytorch: MeasuredVariant, mapped: bool) -> Exact:
    """Measure the fused graph in every way. Raises VerificationError where it does not answer as PyTorch does."""
    measured, quality = evaluator.measure(name, fused.graph, fused.exported.long, mapped)
    _refuse_wrong_answers(evaluator, fused.graph, measured, quality)
    return Exact(fused, evaluator, pytorch, measured, quality, mapped)


def _refuse_wrong_answers(evaluator: Evaluator, graph: Graph, exact: MeasuredVariant, quality: Quality) -> None:
    error = _error(exact)
    if error > TOLERANCE:
        problem = f"the fused graph is off by {error:.1e} of PyTorch's largest output; at most {TOLERANCE:.0e} is right"
    elif quality.error > SERVED_TOLERANCE:
        problem = f"the served answer is not transformers' answer ({quality.where}, off by {quality.error:.1e})"
    else:
        return
    why = cause(graph, evaluator.module, evaluator.rows, evaluator.checkpoint, evaluator.spec.build_threads)
    raise VerificationError(f"{problem}. Nothing was published: {why}")


def _error(measured: MeasuredVariant) -> float:
    return measured.error if measured.error is not None else math.inf


def refuse_without_process(options: LayoutOptions, executor_stated: bool) -> None:
    """Raise SpecError for an option that an engine in the front's own process does not have."""
    if not options.in_process:
        if options.executor == "in-process" and executor_stated:
            raise SpecError("on a GPU an encoder's engine is a Triton model of its own: leave --executor out")
        return
    if options.serving.front_instances not in (None, options.instances):
        raise SpecError(
            "serving.front_instances: in process each front has an engine of its own, so --instances sets both; "
            "leave it out, or use --executor bls"
        )
    if options.serving.optimization_level:
        raise SpecError("serving.optimization_level is for Triton's own backends: leave it out, or use --executor bls")


def _refuse_composed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model of several parts or of bytes: its configuration has no layers or no tokens."""
    missing = [name for name in ("num_hidden_layers", "vocab_size") if not hasattr(checkpoint.config, name)]
    if missing:
        raise CheckpointError(
            f"{checkpoint.config.model_type} cannot be served for {checkpoint.task.name}: its config.json has no "
            f"{missing[0]}. Models of several parts (an image or audio encoder beside the text's) and models of bytes "
            "are not supported; a checkpoint of the text part alone may be"
        )


def _calls(evaluator: Evaluator) -> str | None:
    """Describe which texts may share an engine call, if answers depend on the rest of a batch; else None."""
    needed = evaluator.serving.batching.alike
    if needed is None:
        return None
    what = "of the same number of tokens" if needed == "length" else f"in which the token {needed} is equally frequent"
    return f"only texts {what} share an engine call: this model's answers depend on the rest of a batch otherwise"


def _quantised(quantised: Quantised) -> dict[str, object] | None:
    if not quantised.matmuls:
        return None
    return {
        "matmuls": quantised.matmuls,
        "embeddings": quantised.embeddings,
        "left_alone": list(quantised.left_alone),
    }

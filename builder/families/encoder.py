"""Encoders: one graph, one call a batch. Export, measure, fuse, verify, climb the ladder, lay out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from builder.checkpoint import Checkpoint
from builder.engines import tensorrt
from builder.engines.cpu import cpu
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime import FUSED_OPERATORS
from builder.errors import CheckpointError, SpecError, VerificationError
from builder.export.encoder import Export, export, task_graph
from builder.export.experts import cost_of_experts
from builder.export.graph import Graph
from builder.export.rows import rows_of
from builder.families import UNTIMED, Prepared, Stage, built_from
from builder.optimise.compaction import Removed, compact
from builder.optimise.fusion import fuse
from builder.optimise.pruning import prune
from builder.optimise.variants import Variant, Workshop, asked
from builder.report import BuildReport, EngineCheck, Rung, file_hashes, versions
from builder.repository.layout import RepositoryEntry, lay_out, version_files
from builder.repository.recipe import recipe_files
from builder.spec import BuildSpec
from builder.verify.bench import Bench, make_bench
from builder.verify.causes import cause
from builder.verify.latency import pytorch_latencies
from builder.verify.memory import Memory, memory_of
from builder.verify.parity import TOLERANCE, long_references
from builder.verify.quality import Quality
from builder.verify.runtimes import graph_case, verify_where_it_runs
from builder.verify.search import Found, Search

SERVED_TOLERANCE = 1e-3  # fp32 answers against the pipeline's, whose own batches differ in the last digits
EXACT_LEVEL = "O2"  # the highest level whose rewrites leave every value as it is


@dataclass(frozen=True)
class VerifiedModel:
    """A graph whose answers were found to be the reference's. Nothing else can be published."""

    graph: Graph
    bench: Bench
    ladder: tuple[Rung, ...]
    found: Found
    threshold: float


def prepare(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Prepared:
    """The front model and its engine, verified. Raises BuilderError."""
    if spec.beams is not None or spec.max_answer is not None:
        raise SpecError(f"--beams and --max-answer are for models that generate; {checkpoint.task.name} has neither")
    _refuse_composed(checkpoint)
    variants = asked(spec, cpu()["flags"])
    with stage("export"):
        long = long_references(task_graph(checkpoint, spec), rows_of(checkpoint), checkpoint.max_length)
        exported = export(checkpoint, spec, folder)
    with stage("measure PyTorch"):
        reference = _pytorch_rung(spec, checkpoint, exported)
    with stage("fuse"):
        graph, empty = compact(exported.graph, folder)
        fused = fuse(graph, folder, min(spec.level, EXACT_LEVEL))
    with stage("verify"):
        bench = make_bench(spec, checkpoint, exported.module, fused, folder)
        level = f"{spec.level} " if spec.level < EXACT_LEVEL else ""
        exact, quality = bench.rung(f"{level}{'' if empty is None else 'compacted '}fp32", fused)
        exact = replace(exact, error=max(exact.error or 0.0, bench.error_on(fused, long)))
        _refuse_wrong_answers(bench, fused, exact, quality)
    pruned = None
    if spec.prune is not None:
        with stage("prune"):
            graph, pruned = prune(graph, exported.module, spec.prune, bench.feeds, folder)
    reference = replace(reference, scores=dict(bench.reference_scores))
    as_verified = fused if pruned is None and spec.level <= EXACT_LEVEL else None
    workshop = Workshop(spec, graph, folder, bench.feeds, as_verified)
    verified = climb(bench, workshop, reference, (exact, quality), variants, stage)
    graph = verified.graph
    if spec.target != "cpu":
        refuse_size(
            spec, graph.size * spec.instances, f"the weights of {spec.instances} instances", "use fewer --instances"
        )
    checks = verify_where_it_runs(
        spec, graph.engine, False, lambda: [graph_case(graph, bench.feeds, spec.build_threads)], stage
    )
    if graph.engine == tensorrt.BACKEND:
        with stage("recipe"):
            files = recipe_files(spec, graph, bench.serving, bench.feeds, folder)
    else:
        files = version_files(graph)
    entries = lay_out(spec, bench.serving, bench.tokenizer, graph, files, bench.fields, bench.warm_up_rows())
    removed = {"empty": empty, "pruned": pruned}
    return Prepared(entries, _report(spec, checkpoint, exported, verified, removed, entries, checks))


def climb(
    bench: Bench,
    workshop: Workshop,
    reference: Rung,
    verified: tuple[Rung, Quality],
    variants: Sequence[Variant],
    stage: Stage,
) -> VerifiedModel:
    """From PyTorch and the exact graph, `verified`, to the fastest of `variants` that keeps the quality asked for."""
    spec, exact = bench.spec, verified[0]
    threshold = bench.checkpoint.task.required(spec.quality)
    memory = memory_of(_facts(bench)) if len(variants) > 1 else Memory()
    prefix = f"{spec.level} " if spec.level > EXACT_LEVEL else ""
    prefix += exact.name.removesuffix("fp32") + ("" if spec.prune is None else f"pruned {spec.prune:.0%} ")
    found = Search(bench, workshop, reference, verified, threshold, memory, stage, prefix).run(variants)
    rungs = (reference, exact, *(rung for rung in found.rungs if rung.name != exact.name))
    return VerifiedModel(found.made.graph, bench, rungs, found, threshold)


def _facts(bench: Bench) -> dict[str, object]:
    """All that a measurement of a rung depends on."""
    return {
        "checkpoint": bench.checkpoint.identity(),
        "spec": bench.spec.model_dump(mode="json", exclude={"name", "output", "precision", "engine", "quality"}),
        "graph": None if bench.spec.graph is None else hashlib.sha256(bench.spec.graph.read_bytes()).hexdigest(),
        "samples": [bench.samples, bench.labels],
        "feeds": [{name: values.tolist() for name, values in feed.items()} for feed in bench.feeds],
        "versions": versions(),
        "cpu": cpu(),
    }


def _refuse_wrong_answers(bench: Bench, graph: Graph, exact: Rung, quality: Quality) -> None:
    error = exact.error if exact.error is not None else math.inf
    if error > TOLERANCE:
        found = f"the fused graph is off by {error:.1e} of PyTorch's largest output; at most {TOLERANCE:.0e} is right"
    elif quality.error > SERVED_TOLERANCE:
        found = f"the served answer is not transformers' answer ({quality.where}, off by {quality.error:.1e})"
    else:
        return
    why = cause(graph, bench.module, bench.rows, bench.checkpoint, bench.spec)
    raise VerificationError(f"{found}. Nothing was published: {why}")


def _refuse_composed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model of several parts or of bytes: its configuration has no layers or no tokens."""
    missing = [name for name in ("num_hidden_layers", "vocab_size") if not hasattr(checkpoint.config, name)]
    if missing:
        raise CheckpointError(
            f"{checkpoint.config.model_type} cannot be served for {checkpoint.task.name}: its config.json has no "
            f"{missing[0]}. Models of several parts (an image or audio encoder beside the text's) and models of bytes "
            "are not supported; a checkpoint of the text part alone may be"
        )


def _pytorch_rung(spec: BuildSpec, checkpoint: Checkpoint, exported: Export) -> Rung:
    """PyTorch is timed before any engine is open: waiting engine threads would take its cores."""
    latency = {}
    if spec.target == "cpu":
        rows = rows_of(checkpoint)
        latency = pytorch_latencies(exported.module, rows, checkpoint.max_length, spec.build_threads)
    size = sum(parameter.numel() * 4 for parameter in checkpoint.model.parameters())
    return Rung("PyTorch fp32", size, latency, 0.0, 1.0, 1.0, 1.0)


def _calls(bench: Bench) -> str | None:
    """What the model's own ways cost in batches."""
    needed = bench.serving.batching.alike
    if needed is None:
        return None
    what = "of the same number of tokens" if needed == "length" else f"with as many tokens {needed}"
    return f"only texts {what} share an engine call: this model's answers depend on the rest of a batch otherwise"


def _report(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: Export,
    verified: VerifiedModel,
    removed: Mapping[str, Removed | None],
    entries: Sequence[RepositoryEntry],
    checks: tuple[EngineCheck, ...],
) -> BuildReport:
    found, operators, machine = verified.found, verified.graph.operators, cpu()
    return BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": exported.attentions, "layers": exported.layers},
        operators={name: operators[name] for name in FUSED_OPERATORS if operators[name]},
        quantised=None
        if not found.made.matmuls
        else {
            "matmuls": found.made.matmuls,
            "embeddings": found.made.embeddings,
            "left_alone": list(found.made.left_alone),
        },
        removed={name: asdict(units) for name, units in removed.items() if units is not None},
        ladder=verified.ladder,
        metric=checkpoint.task.metric,
        gate=verified.bench.metric,
        threshold=verified.threshold,
        samples=len(verified.bench.samples),
        padding=found.quality.padding,
        warnings=tuple(
            filter(
                None,
                [
                    exported.warning,
                    cost_of_experts(checkpoint.model),
                    _calls(verified.bench),
                    None if spec.target == "cpu" else UNTIMED,
                ],
            )
        ),
        choice=found.choice,
        chosen=found.chosen.name,
        engine=verified.graph.engine,
        tuned_for=tuple(flag for flag in found.variant.fast_with if flag in machine["flags"]),
        files=file_hashes(entries),
        verified_on=checks,
    )

"""Encoders: one graph, one call a batch. Export, measure, fuse, verify, quantise, lay out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.checkpoint import Checkpoint
from builder.engines.onnxruntime import FUSED_OPERATORS
from builder.errors import SpecError, VerificationError
from builder.export.encoder import Export, export
from builder.export.graph import Graph, check_release
from builder.families import Prepared, Stage
from builder.optimise.fusion import fuse
from builder.optimise.quantisation import Quantised, quantise
from builder.report import BuildReport, Rung, cpu, file_hashes, versions
from builder.repository.layout import RepositoryEntry, lay_out
from builder.spec import BuildSpec
from builder.verify.bench import Bench, make_bench
from builder.verify.latency import pytorch_latencies
from builder.verify.parity import TOLERANCE
from builder.verify.quality import Quality

SERVED_TOLERANCE = 1e-3  # fp32 answers against the pipeline's, whose own batches differ in the last digits
PRECISIONS = ("fp32", "int8")


@dataclass(frozen=True)
class VerifiedModel:
    """A graph whose answers were found to be the reference's. Nothing else can be published."""

    graph: Graph
    bench: Bench
    ladder: tuple[Rung, ...]
    quality: Quality
    threshold: float
    quantised: Quantised | None


def prepare(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Prepared:
    """The front model and its engine, verified. Raises BuilderError."""
    if spec.precision not in PRECISIONS:
        raise SpecError(
            f"--precision {spec.precision} is for models that generate; {checkpoint.task.name} has "
            + " and ".join(PRECISIONS)
        )
    if spec.beams is not None or spec.max_answer is not None:
        raise SpecError(f"--beams and --max-answer are for models that generate; {checkpoint.task.name} has neither")
    with stage("export"):
        exported = export(checkpoint, spec, folder)
    with stage("measure PyTorch"):
        reference = _pytorch_rung(spec, checkpoint, exported)
    with stage("fuse"):
        fused = fuse(exported.graph, folder, spec.threads_per_instance)
        check_release(fused, spec.triton)
    with stage("verify"):
        bench = make_bench(spec, checkpoint, exported.module, fused, folder)
        verified = verify(bench, fused, reference, folder)
    entries = lay_out(spec, bench.serving, bench.tokenizer, verified.graph, bench.fields, bench.warm_up_rows())
    return Prepared(entries, _report(spec, checkpoint, exported, verified, entries))


def verify(bench: Bench, fused: Graph, reference: Rung, folder: Path) -> VerifiedModel:
    """Compare the fused graph with PyTorch and the emitted code with transformers; then quantise, if asked.

    Raises VerificationError with the number that was missed.
    """
    spec, task = bench.spec, bench.checkpoint.task
    threshold = task.required(spec.quality)
    quality = bench.quality(fused)
    exact = bench.rung("fp32 fused", fused, quality)
    _refuse_wrong_answers(exact, quality)
    if spec.precision == "fp32":
        return VerifiedModel(fused, bench, (reference, exact), quality, threshold, None)
    quantised = quantise(fused, folder, lambda graph: bench.quality(graph).mean, threshold, bench.feeds)
    quality = bench.quality(quantised.graph)
    rounded = bench.rung("int8 dynamic", quantised.graph, quality)
    return VerifiedModel(quantised.graph, bench, (reference, exact, rounded), quality, threshold, quantised)


def _refuse_wrong_answers(exact: Rung, quality: Quality) -> None:
    if exact.error > TOLERANCE:
        raise VerificationError(
            f"the fused graph is off by {exact.error:.1e} of PyTorch's largest output; at most {TOLERANCE:.0e} is "
            "right. Nothing was published: this is a bug worth reporting, with the checkpoint's name"
        )
    if quality.error > SERVED_TOLERANCE:
        raise VerificationError(
            f"the served answer is not transformers' answer ({quality.where}, off by {quality.error:.1e}). "
            "Nothing was published: this is a bug worth reporting, with the checkpoint's name"
        )


def _pytorch_rung(spec: BuildSpec, checkpoint: Checkpoint, exported: Export) -> Rung:
    """PyTorch is timed before any engine is open: waiting engine threads would take its cores."""
    latency = pytorch_latencies(exported.module, checkpoint.max_length, spec.threads_per_instance)
    size = sum(parameter.numel() * 4 for parameter in checkpoint.model.parameters())
    return Rung("PyTorch fp32", size, latency, 0.0, 1.0, 1.0, 1.0)


def _report(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: Export,
    verified: VerifiedModel,
    entries: Sequence[RepositoryEntry],
) -> BuildReport:
    quantised, operators = verified.quantised, verified.graph.operators
    return BuildReport(
        name=spec.entry_name,
        task=checkpoint.task.name,
        triton=spec.triton,
        checkpoint=checkpoint.identity(),
        versions=versions(),
        cpu=cpu(),
        attention={"fused": exported.attentions, "layers": exported.layers},
        operators={name: operators[name] for name in FUSED_OPERATORS if operators[name]},
        quantised=None
        if quantised is None
        else {
            "matmuls": quantised.matmuls,
            "embeddings": quantised.embeddings,
            "left_alone": list(quantised.left_alone),
        },
        ladder=verified.ladder,
        metric=checkpoint.task.metric,
        threshold=verified.threshold,
        samples=len(verified.bench.samples),
        padding=verified.quality.padding,
        warnings=tuple(filter(None, [exported.warning])),
        files=file_hashes(entries),
    )

"""The product in one function: a checkpoint becomes a verified, published model repository."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.checkpoint import Checkpoint, resolve
from builder.engines.onnxruntime import FUSED_OPERATORS
from builder.errors import RepositoryError, VerificationError
from builder.export.encoder import Export, export
from builder.export.graph import Graph, check_release
from builder.optimise.fusion import fuse
from builder.optimise.quantisation import Quantised, quantise
from builder.report import BuildReport, Rung, cpu, file_hashes, versions
from builder.repository.layout import RepositoryEntry, lay_out
from builder.repository.publish import existing_source, publish, recover
from builder.spec import BuildSpec
from builder.verify.bench import Bench, make_bench
from builder.verify.latency import pytorch_latencies
from builder.verify.parity import TOLERANCE
from builder.verify.quality import Quality

Stage = Callable[[str], AbstractContextManager[Any]]
SERVED_TOLERANCE = 1e-3  # fp32 answers against the pipeline's, whose own batches differ in the last digits


@dataclass(frozen=True)
class VerifiedModel:
    """A graph whose answers were found to be the reference's. Nothing else can be published."""

    graph: Graph
    bench: Bench
    ladder: tuple[Rung, ...]
    quality: Quality
    threshold: float
    quantised: Quantised | None


def build(spec: BuildSpec, stage: Stage = lambda name: nullcontext()) -> BuildReport:
    """Build `spec` and publish it. Raises BuilderError; the repository is then as it was.

    `stage` is entered with each stage's name, for whoever shows progress.
    """
    recover(spec.output)
    with tempfile.TemporaryDirectory(prefix="build-repo-") as place:
        folder = Path(place)
        with stage("resolve"):
            checkpoint = resolve(spec)
            _refuse_another_checkpoint(spec, checkpoint)
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
        with stage("publish"):
            entries = lay_out(spec, bench.serving, bench.tokenizer, verified.graph, bench.fields, bench.warm_up_rows())
            report = _report(spec, checkpoint, exported, verified, entries)
            publish(spec.output, entries[::-1], report.document())
    return report


def verify(bench: Bench, fused: Graph, reference: Rung, folder: Path) -> VerifiedModel:
    """Compare the fused graph with PyTorch and the emitted code with transformers; then quantise, if asked.

    Raises VerificationError with the number that was missed.
    """
    spec, task = bench.spec, bench.checkpoint.task
    threshold = spec.quality if spec.quality is not None else task.threshold
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


def _refuse_another_checkpoint(spec: BuildSpec, checkpoint: Checkpoint) -> None:
    for name in (spec.entry_name, f"{spec.entry_name}_model"):
        source = existing_source(spec.output, name)
        if source is not None and source != checkpoint.source:
            raise RepositoryError(
                f"{spec.output} already has a model {name}, built from {source}; this one is built from "
                f"{checkpoint.source}. Give it another name with --name, or remove that folder first"
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
        checkpoint={
            "source": checkpoint.source,
            "revision": checkpoint.revision,
            "model_type": checkpoint.config.model_type,
            "weights_sha256": checkpoint.weights_sha256,
        },
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

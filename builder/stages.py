"""The product in one function: a checkpoint becomes a verified, published model repository."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.checkpoint import Checkpoint, resolve, tokenizer_json
from builder.engines.onnxruntime import FUSED_OPERATORS
from builder.errors import CheckpointError, RepositoryError, VerificationError
from builder.export.encoder import Export, export
from builder.export.graph import Graph, check_release
from builder.optimise.fusion import fuse
from builder.optimise.quantisation import Quantised, quantise
from builder.report import BuildReport, Rung, cpu, file_hashes, versions
from builder.repository.layout import RepositoryEntry, lay_out, serving_document
from builder.repository.publish import existing_source, publish, recover
from builder.runtime.fields import Field
from builder.runtime.pipeline import Pipeline
from builder.samples import load_samples, with_mask
from builder.spec import BuildSpec
from builder.tasks.base import Answer, Sample
from builder.tensors import to_tensors
from builder.verify.latency import Latencies, engine_latencies, pytorch_latencies
from builder.verify.parity import TOLERANCE, graph_error
from builder.verify.quality import Quality, served_quality

Stage = Callable[[str], AbstractContextManager[Any]]
SERVED_TOLERANCE = 1e-3  # fp32 answers against the pipeline's, whose own batches differ in the last digits


@dataclass(frozen=True)
class Bench:
    """What every rung is measured on: the emitted front, the samples and what transformers answers to them."""

    front: Path
    fields: tuple[Sequence[Field], Sequence[Field]]
    samples: tuple[Sample, ...]
    expected: tuple[Answer, ...]


@dataclass(frozen=True)
class VerifiedModel:
    """A graph whose answers were found to be the reference's. Nothing else can be published."""

    graph: Graph
    serving: Mapping[str, Any]
    tokenizer: str
    fields: tuple[Sequence[Field], Sequence[Field]]
    warm_up_rows: Sequence[Mapping[str, Sequence[int]]]
    ladder: tuple[Rung, ...]
    quantised: Quantised | None
    samples: int
    padding: float


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
            reference = pytorch_latencies(exported.module, checkpoint.max_length, spec.threads_per_instance)
        with stage("fuse"):
            fused = fuse(exported.graph, folder, spec.threads_per_instance)
            check_release(fused, spec.triton)
        with stage("verify"):
            verified = verify(spec, checkpoint, exported, fused, folder, reference)
        with stage("publish"):
            entries = lay_out(
                spec, verified.serving, verified.tokenizer, verified.graph, verified.fields, verified.warm_up_rows
            )
            report = _report(spec, checkpoint, exported, verified, entries)
            publish(spec.output, entries[::-1], report.document())
    return report


def verify(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: Export,
    fused: Graph,
    folder: Path,
    reference: Latencies,
) -> VerifiedModel:
    """Compare the fused graph with PyTorch and the emitted code with transformers; then quantise, if asked.

    Raises VerificationError with the number that was missed.
    """
    task = checkpoint.task
    parameters = task.parameters(checkpoint, spec)
    pad = {"input_ids": checkpoint.tokenizer.pad_token_id or 0}
    serving = serving_document(spec, task.module, fused, checkpoint.max_length, pad, parameters)
    tokenizer = tokenizer_json(checkpoint.tokenizer)
    bench = _bench(spec, checkpoint, folder, serving, tokenizer, parameters)
    size = sum(parameter.numel() * 4 for parameter in checkpoint.model.parameters())
    pytorch = Rung("PyTorch fp32", size, reference, 0.0, 1.0, 1.0, 1.0)

    def measure(graph: Graph) -> Quality:
        return served_quality(
            graph, bench.front, task, bench.fields, bench.samples, bench.expected, spec.threads_per_instance
        )

    def rung(name: str, graph: Graph, quality: Quality) -> Rung:
        latency = engine_latencies(graph, checkpoint.max_length, spec.threads_per_instance, spec.serving.spinning)
        error = _graph_error(spec, checkpoint, exported, graph)
        return Rung(name, graph.size, latency, error, quality.mean, quality.worst, quality.batch_agreement)

    quality = measure(fused)
    exact = rung("fp32 fused", fused, quality)
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
    ladder: tuple[Rung, ...] = (pytorch, exact)
    graph, quantised = fused, None
    if spec.precision == "int8":
        threshold = spec.quality if spec.quality is not None else task.threshold
        feeds = _engine_feeds(bench)
        quantised = quantise(fused, folder, lambda candidate: measure(candidate).mean, threshold, feeds)
        quality, graph = measure(quantised.graph), quantised.graph
        ladder = (*ladder, rung("int8 dynamic", graph, quality))
    rows = _warm_up_rows(bench, serving)
    return VerifiedModel(
        graph, serving, tokenizer, bench.fields, rows, ladder, quantised, len(bench.samples), quality.padding
    )


def _refuse_another_checkpoint(spec: BuildSpec, checkpoint: Checkpoint) -> None:
    for name in (spec.entry_name, f"{spec.entry_name}_model"):
        source = existing_source(spec.output, name)
        if source is not None and source != checkpoint.source:
            raise RepositoryError(
                f"{spec.output} already has a model {name}, built from {source}; this one is built from "
                f"{checkpoint.source}. Give it another name with --name, or remove that folder first"
            )


def _bench(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    folder: Path,
    serving: Mapping[str, Any],
    tokenizer: str,
    parameters: Mapping[str, Any],
) -> Bench:
    """Write the front's files and ask transformers for the answers to the samples that fit the model."""
    task = checkpoint.task
    fields = task.fields(parameters)
    front = folder / "front"
    front.mkdir()
    (front / "serving.json").write_text(json.dumps(serving), "utf-8")
    (front / "tokenizer.json").write_text(tokenizer, "utf-8")
    if spec.samples is not None:
        samples = load_samples(spec.samples, fields[0])
    else:
        mask = checkpoint.tokenizer.mask_token or ""
        samples = tuple(s for s in (with_mask(s, mask) for s in task.samples) if _fits(s, checkpoint))
    if not samples:
        raise CheckpointError(
            f"none of the default samples fits {checkpoint.max_length} tokens; give your own with --samples"
        )
    expected = tuple(task.reference(checkpoint, spec, sample) for sample in samples)
    return Bench(front, fields, samples, expected)


def _fits(sample: Sample, checkpoint: Checkpoint) -> bool:
    texts = [value for value in sample.values() if isinstance(value, str)]
    lists = [item for value in sample.values() if isinstance(value, list) for item in value]
    longest = max(lists, key=len, default="")
    return len(checkpoint.tokenizer(" ".join([*texts, longest]))["input_ids"]) + 3 <= checkpoint.max_length


def _graph_error(spec: BuildSpec, checkpoint: Checkpoint, exported: Export, graph: Graph) -> float:
    vocabulary = int(checkpoint.config.vocab_size)
    limits = (checkpoint.max_length, spec.threads_per_instance)
    return graph_error(graph, exported.module, vocabulary, *limits, per_token=checkpoint.task.per_token)


def _engine_feeds(bench: Bench) -> list[dict[str, np.ndarray]]:
    """The engine's own inputs on the samples, as the emitted code makes them."""
    seen: list[dict[str, np.ndarray]] = []

    def record(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(feeds)
        raise InterruptedError  # the answer is not needed: each request fails alone, after its feeds were seen

    Pipeline(bench.front, record)([to_tensors(sample, bench.fields[0]) for sample in bench.samples])
    return seen


def _warm_up_rows(bench: Bench, serving: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    """The tokens of the shortest and the longest row of the samples."""
    feeds = _engine_feeds(bench)
    names = list(serving["inputs"])
    rows = []
    for batch in (feeds[0], feeds[-1]):
        length = int(batch["attention_mask"][0].sum())
        rows.append(
            {
                n: batch[n][0, :length].tolist() if serving["inputs"][n] != "task" else batch[n][0].tolist()
                for n in names
            }
        )
    return rows


def _report(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    exported: Export,
    verified: VerifiedModel,
    entries: Sequence[RepositoryEntry],
) -> BuildReport:
    quantised = verified.quantised
    return BuildReport(
        name=spec.entry_name,
        repository=str(spec.output),
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
        fused={
            "attention": exported.attentions,
            "layers": exported.layers,
            **{name: verified.graph.operators[name] for name in FUSED_OPERATORS if verified.graph.operators[name]},
        },
        quantised=None
        if quantised is None
        else {
            "matmuls": quantised.matmuls,
            "embeddings": quantised.embeddings,
            "left_alone": list(quantised.left_alone),
        },
        ladder=verified.ladder,
        metric=checkpoint.task.metric,
        threshold=spec.quality if spec.quality is not None else checkpoint.task.threshold,
        samples=verified.samples,
        padding=verified.padding,
        warnings=tuple(filter(None, [exported.warning])),
        files=file_hashes(entries),
    )

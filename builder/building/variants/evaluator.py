"""Measurements of every variant of an encoder: the emitted front, the samples, and transformers' answers to them.

Knows the checkpoint and its task; the numbers come from parity, quality and latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from builder.building.variants.budget import Allowance
from builder.building.variants.timing import engine_latencies
from builder.building.variants.traffic import Rates, measure
from builder.building.verify.parity import BatchReference, batching_constraint, error_at, usual_references
from builder.building.verify.quality import Quality, answers_of, served_quality
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import Answer, Sample, TaskGraph, encoder_task, one_pipeline
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import CheckpointError, SpecError
from builder.common.files import write_atomically
from builder.common.memory import weights_bytes
from builder.common.samples import load_samples, with_mask
from builder.common.speed import Latencies
from builder.common.tensors import to_tensors
from builder.engines import Infer, infer_with, onnxruntime
from builder.graphs.export.rows import Rows, padding_id, rows_of
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.layout.encoder import LABELS, bucketed, serving_document
from builder.repository.report.record import MeasuredVariant
from builder.runtime.adapter_files import ADAPTER
from builder.runtime.contract import FILE, Alike, EncoderServing, dump
from builder.runtime.encoder.call_inputs import TASK
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.encoder.scores import CLASS_SCORES
from builder.runtime.encoder.task import HEADLESS, OWN_LABELS
from builder.runtime.fields import Field, InputError
from builder.runtime.tokens import TOKENS

MAX_QUICK_WEIGHTS = 200_000_000  # bytes: such a model answers a hundred further texts in seconds
MAX_QUICK_CALLS = 1e13  # tokens, times the bytes of the weights in fp32: about a minute of two cores
MIN_JUDGED_ROWS = 64  # more are not judged if all together take longer
MAX_REQUESTS = 256  # that the front answers at once
MIN_SAMPLES = 16  # samples, of which half are fitted to


@dataclass(frozen=True)
class Evaluator:
    """One model's measurements. `front` contains serving.json and tokenizer.json, as they will be emitted."""

    spec: BuildSpec
    checkpoint: Checkpoint
    module: TaskGraph
    front: Path
    serving: EncoderServing
    tokenizer: str
    fields: tuple[Sequence[Field], Sequence[Field]]
    samples: tuple[Sample, ...]  # to judge on
    labels: tuple[Sample, ...]  # those samples with their right answers; empty if they are unknown
    expected: tuple[Answer, ...]  # transformers' answers to them
    feeds: tuple[dict[str, np.ndarray], ...]  # the engine's inputs on the samples to fit to, call by call
    task_files: Mapping[str, bytes]  # the task's own files of the version folder, by name
    allowance: Allowance | None = None  # of --budget

    @property
    def metric(self) -> str:
        """Meaning of quality here: agreement with PyTorch or, with labels, the share of PyTorch's score."""
        if self.allowance is not None:
            return self.allowance.metric
        if not self.labels:
            return self.checkpoint.task.metric
        return f"share of PyTorch's {next(iter(self.reference_scores))}"

    @cached_property
    def reference_scores(self) -> Mapping[str, float]:
        """PyTorch's own scores, if there are labels. Raises SpecError for labels that cannot be scored."""
        return self._score(self.expected)

    @cached_property
    def rows(self) -> Rows:
        """Tokens that test rows for this checkpoint are made of."""
        return rows_of(self.checkpoint)

    @cached_property
    def usual(self) -> tuple[BatchReference, ...]:
        """PyTorch's answers to the rows that every graph is compared on."""
        return usual_references(self.module, self.rows, self.checkpoint.max_length)

    def relative_quality(self, measured: MeasuredVariant) -> float:
        """Return the quality of a variant, as `metric` defines it; a correlation below zero counts as 0."""
        if self.allowance is not None:
            return self.allowance.kept(measured)
        if not self.labels:
            quality = measured.quality or 0.0
            return 0.0 if quality < 0 else quality  # NaN stays what it is, and is refused
        name, score = next(iter(self.reference_scores.items()))
        return measured.scores[name] / max(score, 1e-9) if measured.scores else 0.0

    @property
    def min_ranking(self) -> Mapping[str, float]:
        """Lowest measures of ranking, by name: the task's, unless the user set a quality or has labels."""
        if self.spec.quality is not None or self.labels or self.allowance is not None:
            return {}
        return encoder_task(self.checkpoint.task).min_ranking

    def _score(self, answers: Sequence[Answer]) -> Mapping[str, float]:
        if not self.labels:
            return {}
        try:
            return encoder_task(self.checkpoint.task).score(self.labels, answers)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            keys = ", ".join(self.checkpoint.task.labels)
            raise SpecError(f"the labels of --samples ({keys}) cannot be scored: expected {error}") from error

    def opened(self, graph: Graph, mapped: bool = False) -> Infer:
        """Open `graph` with the threads and the spinning it will be served with.

        `mapped`: open an ONNX Runtime graph with its weights left in their file.
        """
        threads = self.spec.build_threads
        if mapped:
            return onnxruntime.infer_mapped(graph, threads)
        return infer_with(graph, threads, self.spec.serving.spinning)

    def latency(self, graph: Graph, infer: Infer | None = None) -> Latencies:
        """Return the latencies of `graph`, opened as `infer` or for this alone; nothing for another machine's GPU."""
        if self.spec.target != "cpu":
            return {}
        return engine_latencies(
            infer or self.opened(graph), graph, self.rows, self.checkpoint.max_length, self.spec.chooses_by_time
        )

    def front_of(self, graph: Graph) -> Path:
        """Return the folder of the front's files, as they will be emitted with `graph`."""
        serving = bucketed(self.serving, graph)
        if serving is self.serving:
            return self.front
        folder = self.front.with_name(f"{self.front.name}-{graph.engine}")
        if not folder.exists():
            folder.mkdir()
            _write_front(folder, replace(serving, warm_up=self.warm_up_rows()), self.tokenizer, self.task_files)
        return folder

    def traffic(self, graphs: Mapping[str, Graph]) -> dict[str, Rates]:
        """Return requests a second of the emitted front over each of `graphs`, by name, with the threads of service."""
        fronts = {name: Pipeline(self.front_of(graph), self.opened(graph)) for name, graph in graphs.items()}
        for front in fronts.values():
            front.warm_up()
        return measure(fronts, [to_tensors(sample, self.fields[0]) for sample in self.samples])

    def measure(
        self, name: str, graph: Graph, more: Sequence[BatchReference], mapped: bool
    ) -> tuple[MeasuredVariant, Quality]:
        """Measure `graph` in every way, on `more` rows than usual; `mapped`: with its weights left in their file."""
        infer = self.opened(graph, mapped)
        measured, quality = self.judged(MeasuredVariant(name, graph.size, {}), graph, infer, more)
        return replace(measured, latency_ms=self.latency(graph, infer)), quality

    def judged(
        self,
        measured: MeasuredVariant,
        graph: Graph,
        infer: Infer,
        more: Sequence[BatchReference] = (),
        min_mean: float | None = None,
    ) -> tuple[MeasuredVariant, Quality]:
        """Return `measured`, which has a size, with its quality and its largest relative error against PyTorch.

        Its graph is open as `infer`; the emitted code over it is compared with transformers. A variant whose mean
        agreement cannot reach `min_mean` gets that of some samples alone.
        """
        task, front = encoder_task(self.checkpoint.task), self.front_of(graph)
        min_mean = None if self.labels or self.allowance is not None else min_mean
        quality = served_quality(infer, front, task, self.fields, self.samples, self.expected, self._score, min_mean)
        if quality.samples is not None:
            return replace(measured, quality=quality.mean, judged_samples=quality.samples), quality
        judged = replace(
            measured,
            error=max(error_at(infer, graph, reference, task.per_token) for reference in (*self.usual, *more)),
            quality=quality.mean,
            worst=quality.worst,
            ranking=dict(quality.ranking),
            batch_agreement=quality.batch_agreement,
            scores=dict(quality.scores),
        )
        return judged, quality

    def answers(self, graph: Graph, infer: Infer, requests: Sequence[Sample], name: str) -> Iterator[Answer]:
        """Yield the answers of the front over `graph`, which is open as `infer`, to the many requests of data `name`.

        Raises SpecError for a request that the front refuses.
        """
        pipeline = Pipeline(self.front_of(graph), infer)
        for start in range(0, len(requests), MAX_REQUESTS):
            places = range(start, min(start + MAX_REQUESTS, len(requests)))
            part = {place: to_tensors(requests[place], self.fields[0]) for place in places}
            yield from answers_of(pipeline, part, places, self.fields[1], f"{name}: text")

    def on_more_samples(self) -> Evaluator:
        """Return this evaluator with the task's further samples; itself if the user gave samples or it takes long.

        The fewer samples there are, the better the worst of them looks.
        """
        task = encoder_task(self.checkpoint.task)
        if self.spec.samples is not None or weights_bytes(self.checkpoint.model) > MAX_QUICK_WEIGHTS:
            return self
        front = Pipeline(self.front, _no_engine)
        more = tuple(sample for sample in task.more_samples if _fits(sample, front, self.fields[0]))
        with one_pipeline():
            expected = tuple(task.reference(self.checkpoint, sample) for sample in more)
        return replace(self, samples=self.samples + more, expected=self.expected + expected)

    def serving_as(self, spec: BuildSpec, graph: Graph) -> Evaluator:
        """Return this evaluator for the front of another `spec`, with its queue and its batches."""
        before = self.serving
        alike, shares = before.batching.alike, before.batching.shares_prefixes
        serving = _serving(spec, self.checkpoint, graph, alike, before.parameters, shares)
        if serving != self.serving:
            write_atomically(self.front / FILE, dump(serving).encode())
        return replace(self, serving=serving)

    def warm_up_rows(self) -> list[dict[str, list[int]]]:
        """Return the tokens of a short and of a long text of the samples, without padding."""
        sources = self.serving.inputs
        rows = []
        for call in (self.feeds[0], self.feeds[-1]):
            length = int(call["attention_mask"][0].sum()) if "attention_mask" in call else call["input_ids"].shape[1]
            lengths = {name: None if source == TASK else length for name, source in sources.items()}
            rows.append({name: call[name][0, : lengths[name]].tolist() for name in sources})
        return rows


def make_evaluator(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    module: TaskGraph,
    graph: Graph,
    folder: Path,
    shares_prefixes: bool = False,
) -> Evaluator:
    """Write the front's files into `folder` and ask transformers for its answers.

    `shares_prefixes`: True if `graph` computes equal beginnings of rows once.
    Raises SpecError for samples that do not fit the task, CheckpointError when there are none to verify on.
    """
    task = encoder_task(checkpoint.task)
    parameters, files = task.parameters(checkpoint), task.files(checkpoint)
    if spec.serving.dynamo:
        parameters[CLASS_SCORES] = True
        files[LABELS] = "".join(f"{label}\n" for label in parameters["labels"]).encode()
    constraint = batching_constraint(module, rows_of(checkpoint), checkpoint.max_length)
    if spec.adapters and task.has_class_scores:
        parameters |= {CLASS_SCORES: True, OWN_LABELS: True}
    if checkpoint.headless:
        parameters[HEADLESS] = True
    serving = _serving(spec, checkpoint, graph, constraint, parameters, shares_prefixes)
    tokenizer = tokenizer_json(checkpoint.tokenizer)
    front = folder / "front"
    front.mkdir(exist_ok=True)  # an earlier attempt may have left it
    _write_front(front, serving, tokenizer, files)
    inputs, outputs = task.fields(parameters)
    fields = inputs, outputs
    if spec.adapters:  # whose names are an answer in TOKENS
        fields = (*inputs, ADAPTER), tuple(dict.fromkeys((*outputs, TOKENS)))
    if spec.samples is not None:
        samples: tuple[Sample, ...] = load_samples(spec.samples, inputs, task.labels)
    else:
        mask = checkpoint.tokenizer.mask_token or ""
        front_alone = Pipeline(front, _no_engine)
        samples = tuple(
            s for s in (with_mask(s, mask) for s in task.samples_for(checkpoint)) if _fits(s, front_alone, fields[0])
        )
        if not spec.fits and _takes_long(front_alone, samples, fields[0], weights_bytes(checkpoint.model)):
            samples = samples[::2]
    if not samples:
        raise CheckpointError(
            f"none of the default samples fits {checkpoint.max_length} tokens; give your own with --samples"
        )
    labelled = samples if set(task.labels) & set(samples[0]) else ()
    samples = tuple({k: value for k, value in sample.items() if k not in task.labels} for sample in samples)
    fitted = judged = samples
    labels = labelled
    if spec.fits:  # quality on samples that were fitted to looks too good
        if len(samples) < MIN_SAMPLES:
            raise SpecError(
                f"calibration and pruning use half of the samples and are judged on the other half: {len(samples)} are "
                f"too few, at least {MIN_SAMPLES} are needed. Give more with --samples"
            )
        fitted, judged, labels = samples[::2], samples[1::2], labelled[1::2]
    feeds = _engine_feeds(front, fields, fitted)
    with one_pipeline():
        expected = tuple(task.reference(checkpoint, sample) for sample in judged)
    return Evaluator(
        spec, checkpoint, module, front, serving, tokenizer, fields, judged, labels, expected, feeds, files
    )


def _write_front(folder: Path, serving: EncoderServing, tokenizer: str, files: Mapping[str, bytes]) -> None:
    """Write what the emitted front reads; `files`: those of its task, by name."""
    (folder / FILE).write_text(dump(serving), "utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    for name, contents in files.items():
        (folder / name).write_bytes(contents)


def _serving(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    graph: Graph,
    constraint: Alike,
    parameters: Mapping[str, Any],
    shares_prefixes: bool,
) -> EncoderServing:
    module, side = encoder_task(checkpoint.task).module, checkpoint.tokenizer.truncation_side
    pad = {"input_ids": padding_id(checkpoint)}
    return serving_document(
        spec, module, graph, checkpoint.max_length, pad, parameters, constraint, side, shares_prefixes
    )


def _engine_feeds(
    front: Path, fields: tuple[Sequence[Field], Sequence[Field]], samples: Sequence[Sample]
) -> tuple[dict[str, np.ndarray], ...]:
    """Return the engine's inputs on the samples, call by call, as the emitted code makes them; shortest first.

    Raises SpecError for a sample that the emitted code refuses: the reference could not answer it either. An error of
    that code itself is raised as it is.
    """
    tensors = []
    for number, sample in enumerate(samples, 1):
        try:
            tensors.append(to_tensors(sample, fields[0]))
        except SpecError as error:
            raise SpecError(f"sample {number}: {error}") from error
    feeds, answers = Pipeline(front, _no_engine).feeds(tensors)
    for index, answer in sorted(answers.items()):
        if isinstance(answer, InputError):
            raise SpecError(f"sample {index + 1} is refused by the model itself: {answer}")
        if isinstance(answer, Exception):
            raise answer
    return tuple(feeds)


def _no_engine(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    raise AssertionError("the front is asked for the engine's inputs alone")


def _takes_long(front: Pipeline, samples: Sequence[Sample], fields: Sequence[Field], weights: int) -> bool:
    """Return True if half of the samples have rows enough, and all take a model with `weights` bytes long."""
    lengths = [length for sample in samples for length in _lengths(sample, front, fields)]
    return len(lengths) >= 2 * MIN_JUDGED_ROWS and weights * sum(lengths) > MAX_QUICK_CALLS


def _lengths(sample: Sample, front: Pipeline, fields: Sequence[Field]) -> list[int]:
    """Return the tokens of each text that the emitted task makes of a sample, prompt included."""
    return [len(encoding) for encoding in front.text(front.task.read(to_tensors(sample, fields)).texts)]


def _fits(sample: Sample, front: Pipeline, fields: Sequence[Field]) -> bool:
    """Return True if the texts that the emitted task makes of a sample are within the limit."""
    try:
        return max(_lengths(sample, front, fields)) <= front.task.max_length
    except InputError:
        return False

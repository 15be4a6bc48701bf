"""Build a draft that reads hidden states of its target: the same steps as a decoder's, on the target's samples.

It is compared with PyTorch at every token of the samples, given PyTorch's hidden states of the target. Its precision is
the target's. A rejected proposal costs time and changes no text, so loss by rounding is not refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from builder.building.families import Result
from builder.building.families.decoder.judging import FP32
from builder.building.families.decoder.one_engine import Decoder, decoder_serving
from builder.building.families.generating import needing_cpus, quantised_parts, report_of
from builder.building.verify.generation import MAX_SAMPLE_TOKENS, TOLERANCE, geometry_of
from builder.building.verify.hidden_states import states_of
from builder.building.verify.recording import Case, Recorder
from builder.building.verify.runtimes import Replay
from builder.checkpoints.drafts.layers import DraftLayers
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import VerificationError
from builder.common.memory import ReservedMemory
from builder.common.progress import Stage
from builder.engines.decoding import DecodingEngine, Lowered, engine_of, opened
from builder.engines.optimise import Quantised
from builder.graphs.export.drafts import draft_cache_shapes, export_draft
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.layout.generating import lay_out_generating
from builder.repository.report.record import MeasuredVariant
from builder.repository.verdict import Comparison, ParityBound
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import CallPart, DraftAnswer, Executor

PIECE = 3  # tokens of the calls that go on with cached ones
ROWS = 6  # samples that are compared


@dataclass(frozen=True)
class DraftRow:
    """Hold what the draft reads of a sample, and PyTorch's answers after each token.

    `tokens`: (tokens,); `read`: hidden states of the target, (1, tokens, size); `answer`: at all positions.
    """

    tokens: np.ndarray
    read: np.ndarray
    answer: DraftAnswer

    def answers(self, executor: Executor) -> Iterator[tuple[DraftAnswer, slice]]:
        """Yield the answers of `executor` at some positions: at all in one call, then at the last after the others."""
        length = len(self.tokens)
        cached = max(0, length - PIECE)
        for start, end in ((0, length), (0, cached), (cached, length)):
            if start < end:
                tokens, positions = self.tokens[None, start:end], np.arange(end - start)
                part = CallPart(0, tokens, np.array([start], np.int64), positions)
                yield executor.draft(part, self.read[:, start:end]), slice(start, end)


@dataclass(frozen=True)
class BuiltDraft:
    """Draft of `target`, ready to be laid out: `graph`, as the release's engine reads it; `own`, as this build ran it.

    `variants`: the graph in fp32 as measured, which was compared with PyTorch, and the served one at the end.
    """

    target: Decoder
    spec: BuildSpec
    caches: tuple[LayerShape, ...]
    memory: ReservedMemory
    own: Graph
    graph: Graph
    variants: tuple[MeasuredVariant, ...]
    quantised: tuple[Quantised, ...]
    rows: tuple[DraftRow, ...]

    def replay(self) -> Replay:
        """Return the compared calls."""
        return Replay(self.own.engine, True, lambda: [self._case()])

    def result(self, stage: Stage) -> Result:
        """Return the entry of a decode loop over the draft, whose files the target's entry takes."""
        target = self.target.checkpoint
        assert self.target.draft is not None
        layers, checkpoint = self.target.draft.layers, self.target.draft.checkpoint
        own = self._engine.plan_memory(self.caches, self.memory.weights, target.max_length)
        serving = decoder_serving(target, self._engine, own, self.graph, self.caches)
        serving = replace(serving, hidden_size=layers.states.size, drafts_in_place=layers.in_place)
        serving = needing_cpus(serving, self.spec, [self.graph])
        fields = target.task.fields({})
        entries = lay_out_generating(self.spec, serving, tokenizer_json(target.tokenizer), [self.graph], fields)
        operators = Counter(self.graph.operators)
        attending = sum(cache.heads > 0 for cache in self.caches)
        report = report_of(
            self.spec,
            checkpoint,
            self.graph.engine,
            replace(self.memory, weights=self.graph.size),
            operators,
            entries,
            attention={"fused": operators[self._engine.attention], "layers": attending},
            quantised=quantised_parts(self.spec.precision, self.quantised),
            variants=self.variants,
            samples=len(self.rows),
            warnings=(),
            chosen=self.variants[-1].name,
        )
        bound = ParityBound("the error of log-probabilities in fp32", self.variants[0].error or 0.0, at_most=TOLERANCE)
        return Result(entries, Comparison((bound,)), report)

    def _case(self) -> Case:
        recorder = Recorder(_opened(self.own, self.rows, self.caches, self.spec.build_threads))
        for row in self.rows:
            for _ in row.answers(recorder.executor):
                pass
        graph = self._engine.replayed(self.own, self.graph)
        return recorder.case(graph.path.name, [graph], self.spec.build_threads)

    @property
    def _engine(self) -> DecodingEngine:
        return engine_of(self.spec)


def build_draft(target: Decoder, spec: BuildSpec, memory: ReservedMemory, folder: Path, stage: Stage) -> BuiltDraft:
    """Build the draft of `target` by `spec`, in `folder`. Raises BuilderError."""
    assert target.draft is not None
    layers, engine = target.draft.layers, engine_of(spec)
    with stage("export"):
        caches = draft_cache_shapes(layers)
        exported = export_draft(layers, folder, target.checkpoint.max_length, caches)
    with stage("measure PyTorch"):
        rows = _rows(target, layers)
    with stage("fuse"):
        fused = engine.fuse(exported.graph, folder)
    with stage("verify"):
        exact = _judged(FP32, fused, rows, caches, spec.build_threads)
        if not (exact.error or 0.0) <= TOLERANCE:
            raise VerificationError(
                f"the draft's log-probabilities differ from PyTorch's by {exact.error:.1e}, more than {TOLERANCE:.0e}. "
                "Nothing was published: this is a bug worth reporting, with the checkpoint's name"
            )
    lowered, variants = Lowered(fused, fused), [exact]
    if spec.precision != FP32:
        with stage(spec.precision):
            lowered = engine.lower(fused, spec.precision, folder, None)
            name = engine.variant_name(spec.precision)
            variants.append(_judged(name, lowered.graph, rows, caches, spec.build_threads))
    own, served = engine.for_release(lowered.graph, folder)
    return BuiltDraft(target, spec, caches, memory, own, served, tuple(variants), lowered.quantised, tuple(rows))


def _rows(target: Decoder, layers: DraftLayers) -> list[DraftRow]:
    """Return the first samples, with all that the draft reads of them and PyTorch's answers."""
    rows = []
    for sample in target.rows[:ROWS]:
        row = torch.tensor([sample[:MAX_SAMPLE_TOKENS]])
        read = states_of(target.checkpoint.model, layers.states, row[0].tolist())[:, :-1]
        with torch.no_grad():
            returned = layers(row[:, 1:], read, use_cache=False).last_hidden_state
            logits, following = layers.logits(returned[0]), layers.following(returned)
        answer = DraftAnswer(logits.numpy(), layers.tokens(logits).numpy(), following.numpy())
        rows.append(DraftRow(row[0, 1:].numpy(), read.numpy(), answer))
    return rows


def _opened(graph: Graph, rows: Sequence[DraftRow], caches: Sequence[LayerShape], threads: int) -> Executor:
    """Return an executor of the draft with a slot for any of `rows`."""
    longest = max(len(row.tokens) for row in rows)
    return opened(graph, threads)(geometry_of(caches, 1, longest, rows[0].answer.logits.shape[1]))


def _judged(
    name: str, graph: Graph, rows: Sequence[DraftRow], caches: Sequence[LayerShape], threads: int
) -> MeasuredVariant:
    """Compare `graph` with PyTorch: the error of log-probabilities and hidden states, and the share of equal tokens."""
    executor, error, agreeing = _opened(graph, rows, caches, threads), 0.0, []
    for row in rows:
        expected, scale = row.answer, max(1.0, float(np.abs(row.answer.hidden_states).max()))
        for answer, places in row.answers(executor):
            logits = (torch.from_numpy(values).log_softmax(-1) for values in (answer.logits, expected.logits[places]))
            states = float(np.abs(answer.hidden_states - expected.hidden_states[:, places]).max()) / scale
            error = max(error, float(torch.sub(*logits).abs().max()), states)
            agreeing.append(float((answer.tokens == expected.tokens[places]).mean()))
    return MeasuredVariant(name, graph.size, {}, error, float(np.mean(agreeing)), min(agreeing))

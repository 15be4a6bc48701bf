"""Build a draft that reads hidden states of its target: the same steps as a decoder's, on the target's samples.

It is compared with PyTorch at every token of the samples, given PyTorch's hidden states of the target. Its precision is
the target's. A wrong guess costs time and changes no text, so nothing that it loses by rounding is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from builder.building.families import Result
from builder.building.families.decoder.judging import FP32
from builder.building.families.decoder.one_engine import Decoder, decoder_serving
from builder.building.families.generating import needing_cpus, quantised_parts, report_of
from builder.building.verify.generation import MAX_SAMPLE_TOKENS, TOLERANCE
from builder.building.verify.hidden_states import states_of
from builder.building.verify.recording import Case, graph_case
from builder.building.verify.runtimes import Replay
from builder.checkpoints.drafts.layers import DraftLayers
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import VerificationError
from builder.common.memory import ReservedMemory
from builder.common.progress import Stage
from builder.engines import infer_with
from builder.engines.decoding import DecodingEngine, Lowered, engine_of
from builder.engines.optimise import Quantised
from builder.graphs.export.drafts import draft_cache_shapes, export_draft
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.layout.generating import lay_out_generating
from builder.repository.report.record import MeasuredVariant
from builder.repository.verdict import Comparison, ParityBound
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import HIDDEN_STATES, NEXT_HIDDEN_STATES, StepInputs

PIECE = 3  # tokens of the calls that go on with cached ones
ROWS = 6  # samples that are compared
READ = ("input_ids", HIDDEN_STATES)


@dataclass(frozen=True)
class DraftCall:
    """Inputs of a call, and PyTorch's answers: logits (positions, tokens), and hidden states (positions, size)."""

    feeds: dict[str, np.ndarray]
    logits: np.ndarray
    hidden_states: np.ndarray


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
    calls: tuple[DraftCall, ...]

    def replay(self) -> Replay:
        """Return the compared calls."""
        return Replay(self.own.engine, True, lambda: [self._case()])

    def result(self, stage: Stage) -> Result:
        """Return the entry of a decode loop over the draft, whose files the target's entry takes."""
        target = self.target.checkpoint
        assert self.target.draft is not None
        layers, checkpoint = self.target.draft.layers, self.target.draft.checkpoint
        serving = decoder_serving(target, self._engine, self.memory, self.graph, self.caches)
        serving = needing_cpus(replace(serving, hidden_size=layers.states.size), self.spec, [self.graph])
        fields = target.task.fields({})
        entries = lay_out_generating(self.spec, serving, tokenizer_json(target.tokenizer), [self.graph], fields)
        operators = Counter(self.graph.operators)
        attending = sum(cache.heads > 0 for cache in self.caches)
        report = report_of(
            self.spec,
            checkpoint,
            replace(self.memory, weights=self.graph.size),
            operators,
            entries,
            attention={"fused": operators[self._engine.attention], "layers": attending},
            quantised=quantised_parts(self.spec.precision, self.quantised),
            variants=self.variants,
            samples=len(self.calls),
            warnings=(),
            chosen=self.variants[-1].name,
        )
        bound = ParityBound("the error of log-probabilities in fp32", self.variants[0].error or 0.0, at_most=TOLERANCE)
        return Result(entries, Comparison((bound,)), report)

    def _case(self) -> Case:
        case = graph_case(self.own, [call.feeds for call in self.calls], self.spec.build_threads)
        graph = self._engine.replayed(self.own, self.graph)
        return replace(case, job={**case.job, "model": str(graph.path)})

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
        calls = _whole_rows(target, layers, caches)
    with stage("fuse"):
        fused = engine.fuse(exported.graph, folder)
    with stage("verify"):
        calls += _continued(fused, calls, spec.build_threads)
        exact = _judged(FP32, fused, calls, spec.build_threads)
        if not (exact.error or 0.0) <= TOLERANCE:
            raise VerificationError(
                f"the draft's log-probabilities differ from PyTorch's by {exact.error:.1e}, more than {TOLERANCE:.0e}. "
                "Nothing was published: this is a bug worth reporting, with the checkpoint's name"
            )
    lowered, variants = Lowered(fused, fused), [exact]
    if spec.precision != FP32:
        with stage(spec.precision):
            lowered = engine.lower(fused, spec.precision, folder, None)
            variants.append(_judged(engine.variant_name(spec.precision), lowered.graph, calls, spec.build_threads))
    own, served = engine.for_release(lowered.graph, folder)
    return BuiltDraft(target, spec, caches, memory, own, served, tuple(variants), lowered.quantised, tuple(calls))


def _whole_rows(target: Decoder, layers: DraftLayers, caches: Sequence[LayerShape]) -> list[DraftCall]:
    """Return a call for each of the first samples, with all that the draft reads of it."""
    rows = [torch.tensor([row[:MAX_SAMPLE_TOKENS]]) for row in target.rows[:ROWS]]
    longest, calls = max(row.shape[1] for row in rows), []
    for row in rows:
        read = states_of(target.checkpoint.model, layers.states, row[0].tolist())[:, :-1]
        with torch.no_grad():
            returned = layers(row[:, 1:], read, use_cache=False).last_hidden_state[0]
            logits = layers.logits(returned)
        past = {
            f"past_{kind}_{index}": np.zeros((1, layer.heads, longest, layer.size), np.float32)
            for index, layer in enumerate(caches)
            for kind in ("key", "value")
        }
        feeds = _feeds(row[:, 1:].numpy(), 0, read.numpy(), past)
        calls.append(DraftCall(feeds, logits.numpy(), returned.numpy()))
    return calls


def _continued(graph: Graph, calls: Sequence[DraftCall], threads: int) -> list[DraftCall]:
    """Return calls with the last tokens of each sample, after one with those before them."""
    infer, continued = infer_with(graph, threads), []
    for call in calls:
        if (begun := len(call.logits) - PIECE) > 0:
            past = {name: values for name, values in call.feeds.items() if name.startswith("past_")}
            ids, read = (call.feeds[name] for name in READ)
            present = infer(_feeds(ids[:, :begun], 0, read[:, :begun], past))
            past = {name: present[name.replace("past_", "present_")].copy() for name in past}
            feeds = _feeds(ids[:, begun:], begun, read[:, begun:], past)
            continued.append(DraftCall(feeds, call.logits[begun:], call.hidden_states[begun:]))
    return continued


def _feeds(tokens: np.ndarray, length: int, read: np.ndarray, past: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of a call that requests the logits of all `tokens`, after `length` cached ones."""
    rows, new = tokens.shape
    step = StepInputs(rows, new, tokens.size)
    step.fill(tokens, np.array([length], np.int64), np.arange(tokens.size))
    return {**step.feeds, HIDDEN_STATES: read, **past}


def _judged(name: str, graph: Graph, calls: Sequence[DraftCall], threads: int) -> MeasuredVariant:
    """Compare `graph` with PyTorch: the error of log-probabilities and hidden states, and the share of equal tokens."""
    infer, error, agreeing = infer_with(graph, threads), 0.0, []
    for call in calls:
        answer = infer(call.feeds)
        logits, expected = torch.from_numpy(answer["logits"].copy()), torch.from_numpy(call.logits)
        apart = (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max()
        scale = max(1.0, float(np.abs(call.hidden_states).max()))
        states = float(np.abs(answer[NEXT_HIDDEN_STATES] - call.hidden_states).max()) / scale
        error = max(error, float(apart), states)
        agreeing.append(float((logits.argmax(-1) == expected.argmax(-1)).float().mean()))
    return MeasuredVariant(name, graph.size, {}, error, float(np.mean(agreeing)), min(agreeing))

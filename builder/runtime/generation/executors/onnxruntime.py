"""Run ONNX Runtime in this process with cache inputs and outputs bound to the same buffers.

So a step writes one position and moves nothing else. Knows nothing about requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...contract import GenerationServing, Session
from ...lora import LORA_ROWS, LoraStacks
from ...sessions import onnxruntime, open_session
from .base import (
    HIDDEN_STATES,
    TOP_COUNT,
    TOP_LOGITS,
    TOP_TOKENS,
    TOP_TOTALS,
    CallPart,
    Executor,
    Geometry,
    ScoredCandidates,
    StepInputs,
    TokenCandidates,
    copy_slot,
)
from .states import APPENDED_ROWS, SlotStates

Answer = TypeVar("Answer")  # destination of a call's outputs, except the cache
MAX_BINDINGS = 256  # combinations of slots and positions whose bindings are kept


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "InProcess":
    """Open the graph in `folder` that serving.json names."""
    assert serving.model is not None
    return InProcess(folder / serving.model, geometry, serving.session)


class BoundExecutor(Executor):
    """Runs `session` over bindings of the cache, which are created once for a range of slots and kept."""

    can_speculate = True

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession) -> None:
        super().__init__(geometry)
        self.session = session
        self.inputs = {value.name for value in session.get_inputs()}
        self.logits = np.zeros((geometry.slots, geometry.vocabulary), np.float32)  # every call writes its logits here
        # by first slot, rows, logits, kind and number of outputs: the inputs of one new token a row, their
        # binding, its outputs
        self.decoding: dict[tuple[int, int, int, str, int], tuple[StepInputs, Any, Any]] = {}

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self._answer(CallPart(first, tokens, lengths, logits_positions), self._bind_logits)

    def _answer(
        self, part: CallPart, bind: "Callable[[Any, int], Answer]", counts: "np.ndarray | None" = None, best: int = 0
    ) -> Answer:
        """Run `part`, with outputs bound to what `bind` returns for the number of logits.

        `counts`: see StepInputs; `best`: how many of the most probable tokens the graph finds.
        """
        rows, new = part.tokens.shape
        logits_positions = part.logits_indices
        key = (part.first, rows, len(logits_positions), bind.__name__, best)
        prepared = self.decoding.get(key) if new == 1 else None
        if prepared is None:
            step, binding = self._bind(part.first, rows, new, len(logits_positions), best)
            prepared = step, binding, bind(binding, len(logits_positions))
            if new == 1:
                if len(self.decoding) >= MAX_BINDINGS:
                    self.decoding.clear()
                self.decoding[key] = prepared
        step, binding, answer = prepared
        step.fill(part.tokens, part.lengths, logits_positions, counts)
        self._begin(part, step)
        self._run(step, binding)
        self._end(part, step)
        typed: Answer = answer
        return typed

    def _begin(self, part: CallPart, step: StepInputs) -> None:
        """Prepare memory beside the cache for a call."""

    def _end(self, part: CallPart, step: StepInputs) -> None:
        """Keep what a call returned beside the cache and its answer."""

    def _run(self, step: StepInputs, binding: Any) -> None:
        self.session.run_with_iobinding(binding)

    @abstractmethod
    def _bind(self, first: int, rows: int, new: int, num_logits: int, best: int) -> tuple[StepInputs, Any]:
        """Return the inputs of `new` tokens of each of `rows` slots, and their binding with the cache."""

    def _bind_logits(self, binding: Any, num_logits: int) -> np.ndarray:
        """Bind logits, (positions, vocabulary), to memory that all calls share, or to new memory if it is too small."""
        logits = self.logits[:num_logits]
        if num_logits > len(logits):
            logits = np.zeros((num_logits, self.geometry.vocabulary), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return logits


class InPlace(BoundExecutor):
    """Runs an open session with a cache, states and adapters of its own, bound in place."""

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession) -> None:
        super().__init__(geometry, session)
        self.arena, self.states = geometry.allocate(), SlotStates(geometry)
        self.has_states = bool(geometry.states)
        self.lora = LoraStacks.of(((value.name, value.shape) for value in session.get_inputs()), geometry.slots)
        # A rejected token cannot be taken out of a state.
        self.can_speculate = self.can_speculate and not self.has_states
        self.has_likeliest = TOP_COUNT in self.inputs
        sizes = {value.name: value.shape[-1] for value in session.get_outputs() if value.name == HIDDEN_STATES}
        self.kept = {  # for a draft, by slot and position, as the cache
            name: np.zeros((geometry.slots, 1, geometry.max_length, size), np.float32) for name, size in sizes.items()
        }

    def hidden_states(self, slot: int, start: int, end: int) -> np.ndarray:
        return self.kept[HIDDEN_STATES][slot, :, start:end]

    def likeliest(self, part: CallPart, count: int) -> ScoredCandidates:
        count = min(count, self.geometry.vocabulary)

        def likeliest(binding: Any, num_logits: int) -> ScoredCandidates:
            return bind_likeliest(binding, num_logits, count)

        return self._answer(part, likeliest, best=count)

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        copy_slot({**self.arena, **self.kept}, source, target, length, start)
        self.states.copy(source, target)
        if self.lora is not None:
            self.lora.rows[target] = self.lora.rows[source]

    def _begin(self, part: CallPart, step: StepInputs) -> None:
        if self.has_states:
            self.states.begin(part, step.feeds[APPENDED_ROWS])
        if self.lora is not None:
            step.feeds[LORA_ROWS][:] = self.lora.rows[part.first : part.first + len(part.tokens)]

    def _end(self, part: CallPart, step: StepInputs) -> None:
        for name, tensor in self.kept.items():
            for row, length in enumerate(part.lengths.tolist()):
                tensor[part.first + row, 0, length : length + part.tokens.shape[1]] = step.kept[name][row]

    def _bind(self, first: int, rows: int, new: int, num_logits: int, best: int) -> tuple[StepInputs, Any]:
        step, binding = StepInputs(rows, new, num_logits), self.session.io_binding()
        step.feeds[TOP_COUNT] = np.array([best], np.int64)
        step.feeds[APPENDED_ROWS] = np.ones(rows, np.bool_)
        step.feeds[LORA_ROWS] = np.zeros(rows, np.int64)
        stacks = {} if self.lora is None else self.lora.tensors
        for name, array in (*step.feeds.items(), *stacks.items()):
            if name in self.inputs:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, tensor in (*self.arena.items(), *self.states.tensors.items()):
            view = tensor[first : first + rows]
            kind = view.dtype.type
            binding.bind_input(f"past_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
            binding.bind_output(f"present_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
        for name, tensor in self.kept.items():
            kept = step.kept[name] = np.zeros((rows, new, tensor.shape[-1]), np.float32)
            binding.bind_output(name, "cpu", 0, np.float32, kept.shape, kept.ctypes.data)
        return step, binding


class InProcess(InPlace):
    """Opens a session of its own."""

    def __init__(self, model: Path, geometry: Geometry, session: Session) -> None:
        super().__init__(geometry, open_session(model, session))


def bind_best(binding: Any, num_logits: int, count: int) -> TokenCandidates:
    """Bind outputs for the `count` highest logits of `num_logits` positions."""
    shape = (num_logits, count)
    best = TokenCandidates(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    for name, array in ((TOP_TOKENS, best.tokens), (TOP_LOGITS, best.logits)):
        binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
    return best


def bind_likeliest(binding: Any, num_logits: int, count: int) -> ScoredCandidates:
    """Bind those outputs, and the totals that make them log-probabilities."""
    best, totals = bind_best(binding, num_logits, count), np.zeros((num_logits, 1), np.float32)
    binding.bind_output(TOP_TOTALS, "cpu", 0, np.float32, totals.shape, totals.ctypes.data)
    return ScoredCandidates(best.tokens, best.logits, totals)

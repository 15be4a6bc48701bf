"""ONNX Runtime in this process: a session whose cache inputs and outputs are bound to the same buffers, so that a step
writes one position and moves nothing else. Knows nothing about requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime

from ...contract import Session
from ...sessions import open_session
from .base import Executor, Geometry, Part, Step, copy_slot, last_of_rows

Answer = TypeVar("Answer")  # where the outputs of a call go, but for the cache
MOST_BOUND = 256  # combinations of slots and positions whose bindings are kept


class Bound(Executor):
    """Runs `session` over bindings of the cache, which are made once for a range of slots and kept."""

    guesses = True

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession) -> None:
        super().__init__(geometry)
        self.session = session
        self.inputs = {value.name for value in session.get_inputs()}
        self.logits = np.zeros((geometry.slots, geometry.vocabulary), np.float32)  # where every call leaves its own
        # by first slot, rows, logits and what is bound: the inputs of one new token a row, their binding, its outputs
        self.decoding: dict[tuple[int, int, int, str], tuple[Step, Any, Any]] = {}

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self._answer(Part(first, tokens, lengths, wanted), self._bind_logits)

    def _answer(self, part: Part, bind: "Callable[[Any, int], Answer]", counts: "np.ndarray | None" = None) -> Answer:
        """Run `part`. `bind`: of so many wanted places, bind the outputs to what it returns; `counts`: see Step."""
        rows, new = part.tokens.shape
        wanted = last_of_rows(part.tokens) if part.wanted is None else part.wanted
        key = (part.first, rows, len(wanted), bind.__name__)
        prepared = self.decoding.get(key) if new == 1 else None
        if prepared is None:
            step, binding = self._bind(part.first, rows, new, len(wanted))
            prepared = step, binding, bind(binding, len(wanted))
            if new == 1:
                if len(self.decoding) >= MOST_BOUND:
                    self.decoding.clear()
                self.decoding[key] = prepared
        step, binding, answer = prepared
        step.fill(part.tokens, part.lengths, wanted, counts)
        self._run(step, binding)
        typed: Answer = answer
        return typed

    def _run(self, step: Step, binding: Any) -> None:
        self.session.run_with_iobinding(binding)

    @abstractmethod
    def _bind(self, first: int, rows: int, new: int, wanted: int) -> tuple[Step, Any]:
        """The inputs of `new` tokens of each of `rows` slots, and their binding with the cache."""

    def _bind_logits(self, binding: Any, wanted: int) -> np.ndarray:
        """Where a call leaves (wanted, vocabulary): memory of all calls, or its own where it wants more than that."""
        room = self.logits if wanted <= len(self.logits) else np.zeros((wanted, self.geometry.vocabulary), np.float32)
        logits = room[:wanted]
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return logits


class InPlace(Bound):
    """Over a session that is open already: the cache, which is its own, bound in place."""

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession) -> None:
        super().__init__(geometry, session)
        self.arena = geometry.allocate()

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        copy_slot(self.arena, source, target, length, start)

    def _bind(self, first: int, rows: int, new: int, wanted: int) -> tuple[Step, Any]:
        step, binding = Step(rows, new, wanted), self.session.io_binding()
        for name, array in step.feeds.items():
            if name in self.inputs:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, tensor in self.arena.items():
            view = tensor[first : first + rows]
            kind = view.dtype.type
            binding.bind_input(f"past_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
            binding.bind_output(f"present_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
        return step, binding


class InProcess(InPlace):
    """Over a session of its own."""

    def __init__(self, model: Path, geometry: Geometry, session: Session) -> None:
        super().__init__(geometry, open_session(model, session))

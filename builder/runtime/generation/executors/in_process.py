"""ONNX Runtime in this process: a session whose cache inputs and outputs are bound to the same buffers, so that a step
writes one position and moves nothing else. Knows nothing about requests.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ...contract import Session
from .base import Executor, Geometry, Step, copy_slot
from .sessions import open_session


class Bound(Executor):
    """Runs `session` over bindings of the cache, which are made once for a range of slots and kept."""

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession) -> None:
        super().__init__(geometry)
        self.session = session
        self.inputs = {value.name for value in session.get_inputs()}
        self.logits = np.zeros((geometry.slots, geometry.vocabulary), np.float32)  # where every call leaves its own
        # by first slot and rows: the inputs of one new token a row, and their binding
        self.decoding: dict[tuple[int, int], tuple[Step, Any]] = {}

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows, new = tokens.shape
        prepared = self.decoding.get((first, rows)) if new == 1 else None
        if prepared is None:
            prepared = self._bind(first, rows, new)
            if new == 1:
                self.decoding[first, rows] = prepared
        step, binding = prepared
        step.fill(tokens, lengths)
        self._run(step, binding)
        return self.logits[:rows]

    def _run(self, step: Step, binding: Any) -> None:
        self.session.run_with_iobinding(binding)

    @abstractmethod
    def _bind(self, first: int, rows: int, new: int) -> tuple[Step, Any]:
        """The inputs of `new` tokens of each of `rows` slots, bound with the cache and the logits."""


class InProcess(Bound):
    """ONNX Runtime in this process, the cache bound in place."""

    def __init__(self, model: Path, geometry: Geometry, session: Session) -> None:
        super().__init__(geometry, open_session(model, session))
        self.arena = geometry.allocate()

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        copy_slot(self.arena, source, target, length, start)

    def _bind(self, first: int, rows: int, new: int) -> tuple[Step, Any]:
        step, binding = Step(rows, new), self.session.io_binding()
        for name, array in step.feeds.items():
            if name in self.inputs:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, tensor in self.arena.items():
            view = tensor[first : first + rows]
            kind = view.dtype.type
            binding.bind_input(f"past_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
            binding.bind_output(f"present_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
        logits = self.logits[:rows]
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return step, binding

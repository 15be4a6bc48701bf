"""Run a draft that reads the hidden states of its target: ONNX Runtime in this process, over a cache of its own.

Its graph also returns the most probable next token, as an id of the target, and the hidden states that it would read
with that token. Knows nothing about requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...contract import GenerationServing
from ...sessions import onnxruntime, open_session
from .base import HIDDEN_STATES, NEXT_HIDDEN_STATES, NEXT_TOKENS, CallPart, DraftAnswer, Geometry, StepInputs
from .onnxruntime import InPlace


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "HiddenStatesDraft":
    """Open the graph in `folder` that serving.json names."""
    assert serving.model is not None
    return HiddenStatesDraft(geometry, open_session(folder / serving.model, serving.session))


class HiddenStatesDraft(InPlace):
    """Slots of a draft; `size`: the numbers that it reads of a token beside its id; `known`: its tokens."""

    reads_hidden_states = True

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession) -> None:
        super().__init__(geometry, session)
        shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
        self.size, self.known = shapes[HIDDEN_STATES][-1], shapes["logits"][-1]
        self.read = np.zeros((1, 0, self.size), np.float32)  # the hidden states of the call that runs

    def draft(self, part: CallPart, hidden_states: np.ndarray) -> DraftAnswer:
        self.read = hidden_states
        return self._answer(part, self._bind_next)

    def _begin(self, part: CallPart, step: StepInputs) -> None:
        step.feeds[HIDDEN_STATES][:] = self.read

    def _bind(self, first: int, rows: int, new: int, num_logits: int, best: int) -> "tuple[StepInputs, Any]":
        step, binding = super()._bind(first, rows, new, num_logits, best)
        read = step.feeds[HIDDEN_STATES] = np.zeros((rows, new, self.size), np.float32)
        binding.bind_input(HIDDEN_STATES, "cpu", 0, np.float32, read.shape, read.ctypes.data)
        return step, binding

    def _bind_next(self, binding: Any, num_logits: int) -> DraftAnswer:
        logits, tokens = np.zeros((num_logits, self.known), np.float32), np.zeros(num_logits, np.int64)
        following = np.zeros((num_logits, self.size), np.float32)
        for name, array in (("logits", logits), (NEXT_TOKENS, tokens), (NEXT_HIDDEN_STATES, following)):
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return DraftAnswer(logits, tokens, following[None])

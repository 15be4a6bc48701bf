"""Run a draft that reads the hidden states of its target: ONNX Runtime in this process, over a cache of its own.

Its graph also returns the most probable next token, as an id of the target, and the hidden states that it would read
with that token. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import GenerationServing
from ...sessions import onnxruntime, open_session
from .base import HIDDEN_STATES, NEXT_HIDDEN_STATES, NEXT_TOKENS, CallPart, Geometry, StepInputs
from .onnxruntime import InPlace


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "HiddenStatesDraft":
    """Open the graph in `folder` that serving.json names."""
    assert serving.model is not None
    return HiddenStatesDraft(geometry, open_session(folder / serving.model, serving.session), serving.hidden_size)


class HiddenStatesDraft(InPlace):
    """Slots of a draft; `size`: the numbers that it reads of a token beside its id."""

    reads_hidden_states = True

    def __init__(self, geometry: Geometry, session: onnxruntime.InferenceSession, size: int) -> None:
        super().__init__(geometry, session)
        self.size = size
        self.read = np.zeros((1, 0, size), np.float32)  # the hidden states of the call that runs

    def draft_token(
        self, slot: int, tokens: "Sequence[int]", start: int, hidden_states: np.ndarray
    ) -> "tuple[int, np.ndarray]":
        self.read = hidden_states
        part = CallPart(slot, np.array([tokens], np.int64), np.array([start], np.int64))
        token, following = self._answer(part, self._bind_next)
        return int(token[0]), following

    def _begin(self, part: CallPart, step: StepInputs) -> None:
        step.feeds[HIDDEN_STATES][:] = self.read

    def _bind(self, first: int, rows: int, new: int, num_logits: int, best: int) -> "tuple[StepInputs, Any]":
        step, binding = super()._bind(first, rows, new, num_logits, best)
        read = step.feeds[HIDDEN_STATES] = np.zeros((rows, new, self.size), np.float32)
        binding.bind_input(HIDDEN_STATES, "cpu", 0, np.float32, read.shape, read.ctypes.data)
        return step, binding

    def _bind_next(self, binding: Any, num_logits: int) -> "tuple[np.ndarray, np.ndarray]":
        token, following = np.zeros(num_logits, np.int64), np.zeros((num_logits, self.size), np.float32)
        for name, array in ((NEXT_TOKENS, token), (NEXT_HIDDEN_STATES, following)):
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return token, following[None]

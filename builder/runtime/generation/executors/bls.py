"""Run the graph in a Triton model of its own, called through BLS, which sends the used part of the cache both ways."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...contract import GenerationServing
from .base import Executor, Geometry, Infer, StepInputs, copy_slot, last_of_rows


def open_executor(infer: Infer, serving: GenerationServing, geometry: Geometry) -> "Bls":
    """Return the executor of the model behind `infer`."""
    return Bls(infer, serving.inputs, geometry)


class Bls(Executor):
    """Graph behind an `infer` callable."""

    can_speculate = True

    def __init__(self, infer: Infer, inputs: Sequence[str], geometry: Geometry) -> None:
        super().__init__(geometry)
        self.arena = geometry.allocate()
        self.infer = infer
        self.inputs = set(inputs)

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        rows, new = tokens.shape
        logits_positions = last_of_rows(tokens) if logits_positions is None else logits_positions
        step = StepInputs(rows, new, len(logits_positions))
        step.fill(tokens, lengths, logits_positions)
        feeds = {name: array for name, array in step.feeds.items() if name in self.inputs}
        used = int(lengths.max())
        for name, tensor in self.arena.items():
            feeds[f"past_{name}"] = np.ascontiguousarray(tensor[first : first + rows, :, :used])
        outputs = self.infer(feeds)
        for name, tensor in self.arena.items():
            present = outputs[f"present_{name}"]
            for row, length in enumerate(lengths.tolist()):
                tensor[first + row, :, length : length + new] = present[row, :, length : length + new]
        return outputs["logits"]

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        copy_slot(self.arena, source, target, length, start)

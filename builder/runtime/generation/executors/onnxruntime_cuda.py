"""Run the decoder's graph with its cache on a GPU: ONNX Runtime in this process, the cache bound in place there.

Only a step's tokens cross to the device, and only the requested logits cross back: all of them, or the highest, which
the graph finds where it runs. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import GenerationServing, Session
from .base import CallPart, Geometry, StepInputs, TokenCandidates
from .cuda import Device, DeviceCache, candidates_of, run_bound
from .onnxruntime import Answer, BoundExecutor, bind_best
from .padded_prefill import padded, places


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "Cuda":
    """Open the graphs in `folder` that serving.json names."""
    assert serving.model is not None
    assert serving.copier is not None
    return Cuda(folder / serving.model, folder / serving.copier, geometry, serving.session)


class Cuda(BoundExecutor):
    """Slots of a cache on a device."""

    joins_prefills = True

    def __init__(self, model: Path, copier: Path, geometry: Geometry, options: Session) -> None:
        device = Device(options)
        super().__init__(geometry, device.open(model))
        self.candidates = candidates_of(self.session)
        self.cache = DeviceCache(device, copier, geometry, geometry.slots, geometry.max_length)
        self.longest_range = self.cache.longest_range() if geometry.slots > 1 else 0

    def _run(self, step: StepInputs, binding: Any) -> None:
        run_bound(self.session, binding, {name: array for name, array in step.feeds.items() if name in self.inputs})

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self.run_together([CallPart(first, tokens, lengths, logits_positions)])[0]

    def run_together(self, parts: "Sequence[CallPart]") -> "list[np.ndarray]":
        logits = self._answer_together(parts, self._bind_logits)
        return [logits[rows] for rows in places(parts)]

    def best(self, parts: "Sequence[CallPart]") -> "list[TokenCandidates]":
        candidates = self._answer_together(parts, self._bind_best).in_order()
        return [candidates[rows] for rows in places(parts)]

    def _answer_together(self, parts: "Sequence[CallPart]", bind: "Callable[[Any, int], Answer]") -> Answer:
        part, counts = padded(parts, self.geometry.max_length)
        return self._answer(part, bind, counts)

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        if start >= length:
            return
        if length - start <= self.longest_range:
            self.cache.copy_range(source, target, start, length)
        else:
            self.cache.copy(source, target)  # up to `start` the slots are equal, and after `length` nothing is read

    def _bind(self, first: int, rows: int, new: int, num_logits: int, best: int) -> "tuple[StepInputs, Any]":
        """Bind the cache of a range of slots, which stays bound; a step's small inputs do not."""
        step, binding = StepInputs(rows, new, num_logits), self.session.io_binding()
        for name, shape in self.cache.shapes.items():
            region = self.cache.region(name, first, (rows, *shape))
            binding.bind_input(f"past_{name}", *region)
            binding.bind_output(f"present_{name}", *region)
        return step, binding

    def _bind_best(self, binding: Any, num_logits: int) -> TokenCandidates:
        return bind_best(binding, num_logits, self.candidates)

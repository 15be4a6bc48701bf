"""Running the decoder's graph over a range of slots. Two ways, one interface.

`InProcess` owns an ONNX Runtime session whose cache inputs and outputs are bound to the same buffers, so that a step
writes one position and moves nothing else. `Remote` calls an `infer` that takes and returns the cache as tensors: a
BLS call of the engine's own Triton model. Both keep the arena; both know nothing about requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


@dataclass(frozen=True)
class Geometry:
    """The arena: `layers` holds each layer's (heads, head size); `cache` is the type of keys and values."""

    slots: int
    max_length: int
    vocabulary: int
    layers: tuple[tuple[int, int], ...]
    cache: str = "float32"

    def allocate(self) -> dict[str, np.ndarray]:
        """Each layer's keys and values, (slots, heads, max_length, size), by the names of the graph's inputs."""
        return {
            f"{kind}_{index}": np.zeros((self.slots, heads, self.max_length, size), self.cache)
            for index, (heads, size) in enumerate(self.layers)
            for kind in ("key", "value")
        }


class Executor:
    """What the engine needs: to run tokens of some slots, and to copy a slot."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.arena = geometry.allocate()

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Append `tokens`, (rows, new) int64, to the slots from `first` on, which hold `lengths` tokens each.

        Returns the logits after each row's last token, (rows, vocabulary); valid until the next call.
        """
        raise NotImplementedError

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        for tensor in self.arena.values():
            tensor[target, :, :length] = tensor[source, :, :length]


class _Step:
    """The small inputs of one call, allocated once for a range of slots and filled in place."""

    def __init__(self, rows: int, new: int) -> None:
        self.feeds: dict[str, np.ndarray] = {
            "input_ids": np.zeros((rows, new), np.int64),
            "position_ids": np.zeros((rows, new), np.int64),
            "seqlens_k": np.zeros(rows, np.int32),
            "total_sequence_length": np.zeros(1, np.int32),
            "logits_index": np.full(rows, new - 1, np.int64),
        }

    def fill(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        feeds, new = self.feeds, tokens.shape[1]
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None] + np.arange(new)
        feeds["seqlens_k"][:] = lengths + (new - 1)
        feeds["total_sequence_length"][...] = lengths.max() + new


class InProcess(Executor):
    """ONNX Runtime in this process, the cache bound in place."""

    def __init__(self, model: Path, geometry: Geometry, session_options: Mapping[str, Any]) -> None:
        super().__init__(geometry)
        self.session = open_session(model, session_options)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.logits = np.zeros((geometry.slots, geometry.vocabulary), np.float32)
        self.decoding: dict[tuple[int, int], tuple[_Step, Any]] = {}

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows, new = tokens.shape
        prepared = self.decoding.get((first, rows)) if new == 1 else None
        if prepared is None:
            prepared = self._bind(first, rows, new)
            if new == 1:
                self.decoding[first, rows] = prepared
        step, binding = prepared
        step.fill(tokens, lengths)
        self.session.run_with_iobinding(binding)
        return self.logits[:rows]

    def _bind(self, first: int, rows: int, new: int) -> tuple[_Step, Any]:
        step, binding = _Step(rows, new), self.session.io_binding()
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


Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class Remote(Executor):
    """The graph behind an `infer` callable; the used part of the cache travels both ways."""

    def __init__(self, infer: Infer, inputs: Sequence[str], geometry: Geometry) -> None:
        super().__init__(geometry)
        self.infer = infer
        self.inputs = set(inputs)

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows, new = tokens.shape
        step = _Step(rows, new)
        step.fill(tokens, lengths)
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


def open_session(model: Path, options: Mapping[str, Any]) -> onnxruntime.InferenceSession:
    """A CPU session; `options` are `threads`, and `entries` of ONNX Runtime's session configuration."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = int(options["threads"])
    settings.inter_op_num_threads = 1
    for key, value in options.get("entries", {}).items():
        settings.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(
        str(model), settings, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )

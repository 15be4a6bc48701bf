"""Run the decoder's graph in a Triton model of its own with the cache on that model's device.

A call returns the cache as a tensor, which is passed unread to the next call: on a GPU only a step's tokens and logits,
all or the highest, cross to the host's memory. Within the GPU the cache is copied: the graph gathers the slots to keep
and those of this call, and scatters the latter back (builder/graphs/onnx/slots.py), and for each tensor of a request
Triton's Python backend allocates memory of the server's and copies into it (python_backend, python_be.cc,
ExecuteBLSRequest). The first call asks the graph for a cache of zeros, so that none is sent. Knows nothing about
requests; of Triton it knows only that a call accepts the handles of an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...contract import GenerationServing
from .base import (
    MAX_CANDIDATES,
    TOP_LOGITS,
    TOP_TOKENS,
    CallPart,
    EngineModel,
    Executor,
    Geometry,
    StepInputs,
    TokenCandidates,
)
from .cuda import copy_to_host, load_cuda
from .padded_prefill import padded, places


def open_executor(infer: EngineModel, serving: GenerationServing, geometry: Geometry) -> "BlsCuda":
    """Return the executor of the model behind `infer`."""
    load_cuda()  # logits may come on the GPU, and are copied from there
    return BlsCuda(infer, serving.inputs, serving.outputs, geometry)


class BlsCuda(Executor):
    """Decoder behind `infer`, which takes arrays and handles, and returns a handle for every tensor on the device.

    `inputs` and `outputs`: those of the graph, `cache_rows`, `cache_slots` and `new_cache_length` among them
    (builder/graphs/onnx/slots.py) and, where it finds candidates, `top_logits` and `top_tokens`
    (builder/graphs/onnx/candidates.py).
    """

    can_speculate = True
    joins_prefills = True

    def __init__(
        self, infer: EngineModel, inputs: "Sequence[str]", outputs: "Sequence[str]", geometry: Geometry
    ) -> None:
        super().__init__(geometry)
        self.infer = infer
        self.inputs = set(inputs)
        self.candidates = min(MAX_CANDIDATES, geometry.vocabulary) if TOP_TOKENS in outputs else 0
        self.new_length = geometry.max_length
        self.cache: "dict[str, Any]" = {  # right rank and type, but unread: the first call creates the cache
            f"{kind}_{index}": np.zeros((1, heads, 1, size), geometry.cache)
            for index, (heads, size) in enumerate(geometry.layers)
            for kind in ("key", "value")
        }
        self.rows = np.arange(geometry.slots)  # the row of the cache that each slot continues

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self.run_together([CallPart(first, tokens, lengths, logits_positions)])[0]

    def run_together(self, parts: "Sequence[CallPart]") -> "list[np.ndarray]":
        (logits,) = self._call(parts, ("logits",))
        return [logits[rows] for rows in places(parts)]

    def best(self, parts: "Sequence[CallPart]") -> "list[TokenCandidates]":
        logits, tokens = self._call(parts, (TOP_LOGITS, TOP_TOKENS))
        candidates = TokenCandidates(tokens, logits).in_order()
        return [candidates[rows] for rows in places(parts)]

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Let `target` continue from `source` at the next call."""
        self.rows[target] = self.rows[source]

    def _call(self, parts: "Sequence[CallPart]", names: "Sequence[str]") -> "list[np.ndarray]":
        """Run one call; return the outputs of those `names`, (positions, ...)."""
        part, counts = padded(parts, self.geometry.max_length)
        rows, new = part.tokens.shape
        logits_positions = part.logits_indices
        step = StepInputs(rows, new, len(logits_positions))
        step.fill(part.tokens, part.lengths, logits_positions, counts)
        feeds: "dict[str, Any]" = {name: array for name, array in step.feeds.items() if name in self.inputs}
        feeds["cache_rows"] = self.rows
        feeds["cache_slots"] = np.arange(part.first, part.first + rows)
        feeds["new_cache_length"] = np.array([self.new_length], np.int64)
        feeds.update({f"past_{name}": handle for name, handle in self.cache.items()})
        outputs = self.infer(feeds, [*names, *(f"present_{name}" for name in self.cache)])
        self.cache = {name: outputs[f"present_{name}"] for name in self.cache}
        self.rows, self.new_length = np.arange(self.geometry.slots), 0
        return [_array(outputs[name]) for name in names]


def _array(value: Any) -> np.ndarray:
    """Return an output as an array; copy it from its device if it is a handle."""
    return value if isinstance(value, np.ndarray) else copy_to_host(value.to_dlpack())

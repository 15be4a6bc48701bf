"""Running the decoder's graph in a Triton model of its own with the cache on that model's device.

The cache is a tensor that a call returns and the next one is given, never looked at here: on a GPU only a step's
tokens and logits cross to the host's memory. Within the GPU the cache is copied: the graph gathers the rows that go on,
and for each tensor of a request Triton's Python backend allocates memory of the server's and copies into it
(python_backend, python_be.cc, ExecuteBLSRequest). The first call asks the graph for a cache of zeros, so that none is
sent. All slots go through every call, so that the cache stays one tensor; slots that are not part of a step write a
token at a position that is not read. Knows nothing about requests, and nothing about
Triton but that a handle can be handed back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .base import Executor, Geometry, Step, last_of_rows

# Arrays and handles in; logits as an array and every present as a handle out.
InferHandles = Callable[["dict[str, Any]"], "Mapping[str, Any]"]


class BlsCuda(Executor):
    """`inputs`: those of the graph, `cache_rows` and `new_cache_length` among them (builder/export/slots.py)."""

    def __init__(self, infer: InferHandles, inputs: "Sequence[str]", geometry: Geometry) -> None:
        super().__init__(geometry)
        self.infer = infer
        self.inputs = set(inputs)
        self.new_length = geometry.max_length + 1  # a full slot that waits has a place for its unread token
        self.cache: "dict[str, Any]" = {  # of the right rank and type, and not read: the first call makes the cache
            f"{kind}_{index}": np.zeros((1, heads, 1, size), geometry.cache)
            for index, (heads, size) in enumerate(geometry.layers)
            for kind in ("key", "value")
        }
        self.held = np.zeros(geometry.slots, np.int64)  # at least what each slot holds
        self.rows = np.arange(geometry.slots)

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: "np.ndarray | None" = None
    ) -> np.ndarray:
        rows, new = tokens.shape
        row, place = np.divmod(last_of_rows(tokens) if wanted is None else wanted, new)
        meant = slice(first, first + rows)
        self.held[meant] = lengths
        column = np.zeros((self.geometry.slots, 1), np.int64)
        found = np.zeros((len(row), self.geometry.vocabulary), np.float32)
        for turn in range(new):  # the operator takes several tokens of one row, or one of several
            column[meant] = tokens[:, turn : turn + 1]
            now = np.flatnonzero(place == turn)
            logits = self._call(column, first + row[now] if len(now) else np.array([first]))
            found[now] = logits[: len(now)]
            self.held[meant] += 1
        return found

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Let `target` go on from `source` at the next call."""
        self.rows[target] = self.rows[source]
        self.held[target] = length

    def _call(self, column: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """One token of every slot; logits (wanted, vocabulary) of the slots that are wanted."""
        step = Step(len(column), 1, len(wanted))
        step.fill(column, self.held, wanted)
        positions = step.feeds["position_ids"]
        np.minimum(positions, self.geometry.max_length - 1, out=positions)  # of a full slot that waits
        feeds: "dict[str, Any]" = {name: array for name, array in step.feeds.items() if name in self.inputs}
        feeds["cache_rows"] = self.rows
        feeds["new_cache_length"] = np.array([self.new_length], np.int64)
        feeds.update({f"past_{name}": handle for name, handle in self.cache.items()})
        outputs = self.infer(feeds)
        self.cache = {name: outputs[f"present_{name}"] for name in self.cache}
        self.rows, self.new_length = np.arange(self.geometry.slots), 0
        logits: np.ndarray = outputs["logits"]
        return logits

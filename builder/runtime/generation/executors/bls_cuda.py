"""Running the decoder's graph in a Triton model of its own with the cache on that model's device.

The cache is a tensor that a call returns and the next one is given, never looked at here: on a GPU only a step's
tokens and logits, all or the highest, cross to the host's memory. Within the GPU the cache is copied: the graph gathers
the rows that go on, and for each tensor of a request Triton's Python backend allocates memory of the server's and
copies into it (python_backend, python_be.cc, ExecuteBLSRequest). The first call asks the graph for a cache of zeros, so
that none is sent. All slots go through every call, so that the cache stays one tensor; slots that are not part of a
step write a token at a position that is not read. Knows nothing about requests, and nothing about Triton but that a
handle can be handed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import Candidates, EngineModel, Executor, Geometry, Part, Step, last_of_rows
from .candidates import MOST, TOP_LOGITS, TOP_TOKENS, in_order


class BlsCuda(Executor):
    """`infer` takes arrays and handles, and returns every present as a handle.

    `inputs` and `outputs`: those of the graph, `cache_rows` and `new_cache_length` among them (builder/export/slots.py)
    and, where it finds candidates, `top_logits` and `top_tokens` (builder/export/candidates.py).
    """

    def __init__(
        self, infer: EngineModel, inputs: "Sequence[str]", outputs: "Sequence[str]", geometry: Geometry
    ) -> None:
        super().__init__(geometry)
        self.infer = infer
        self.inputs = set(inputs)
        self.candidates = min(MOST, geometry.vocabulary) if TOP_TOKENS in outputs else 0
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
        (logits,) = self._said(Part(first, tokens, lengths, wanted), ("logits",))
        return logits

    def best(self, parts: "Sequence[Part]") -> "list[Candidates]":
        (part,) = parts  # without blocks, and where none joins, a call is of one
        logits, tokens = self._said(part, (TOP_LOGITS, TOP_TOKENS))
        return [in_order(Candidates(tokens, logits))]

    def _said(self, part: Part, outputs: "Sequence[str]") -> "list[np.ndarray]":
        """Run `part`: of each of `outputs`, what the graph says at the places that are wanted."""
        rows, new = part.tokens.shape
        row, place = np.divmod(last_of_rows(part.tokens) if part.wanted is None else part.wanted, new)
        meant = slice(part.first, part.first + rows)
        self.held[meant] = part.lengths
        column = np.zeros((self.geometry.slots, 1), np.int64)
        order, found = [], []
        for turn in range(new):  # the operator takes several tokens of one row, or one of several
            column[meant] = part.tokens[:, turn : turn + 1]
            now = np.flatnonzero(place == turn)
            said = self._call(column, part.first + row[now] if len(now) else np.array([part.first]), outputs)
            order.append(now)
            found.append([output[: len(now)] for output in said])
            self.held[meant] += 1
        back = np.argsort(np.concatenate(order))
        return [np.concatenate(output)[back] for output in zip(*found)]

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Let `target` go on from `source` at the next call."""
        self.rows[target] = self.rows[source]
        self.held[target] = length

    def _call(self, column: np.ndarray, wanted: np.ndarray, names: "Sequence[str]") -> "list[np.ndarray]":
        """One token of every slot; the outputs of those `names`, (wanted, ...), of the slots that are wanted."""
        step = Step(len(column), 1, len(wanted))
        step.fill(column, self.held, wanted)
        positions = step.feeds["position_ids"]
        np.minimum(positions, self.geometry.max_length - 1, out=positions)  # of a full slot that waits
        feeds: "dict[str, Any]" = {name: array for name, array in step.feeds.items() if name in self.inputs}
        feeds["cache_rows"] = self.rows
        feeds["new_cache_length"] = np.array([self.new_length], np.int64)
        feeds.update({f"past_{name}": handle for name, handle in self.cache.items()})
        outputs = self.infer(feeds, [*names, *(f"present_{name}" for name in self.cache)])
        self.cache = {name: outputs[f"present_{name}"] for name in self.cache}
        self.rows, self.new_length = np.arange(self.geometry.slots), 0
        return [outputs[name] for name in names]

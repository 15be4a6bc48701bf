"""Keep the LoRA matrices of a graph's linear layers, stacked by adapter, and the adapter of each row or slot.

The graph adds x @ A[row] @ B[row] to the answer of each such layer, with `row` chosen by a row of the call
(builder/graphs/export/lora.py). Row 0 of a stack has zeros: no adapter. The layers of a classifier's head are replaced
by those of the row's adapter. Knows shapes; knows no engine and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LORA_ROWS = "lora_rows"  # input of a graph: which row of the stacks each row of a call uses, (batch,) int64
LORA_A, LORA_B = "lora_a.", "lora_b."  # its stacks, each with the name of a layer: (rows, in, rank), (rows, rank, out)
LORA_HEAD = "lora_head."  # stack of a layer of the head: (rows, in + 1, out), a matrix with its bias as the last row
STACKS = (LORA_A, LORA_B, LORA_HEAD)


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA matrices by input of the graph: A is (in, rank) and B, with the scale, (rank, out), float32.

    `digest`: identifies the matrices, whatever their `name`. `parameters`: of the task, if its own head has others.
    """

    name: str
    digest: str
    matrices: "Mapping[str, np.ndarray]"
    parameters: "Mapping[str, Any]" = field(default_factory=dict)


class LoraStacks:
    """Stacks by input of the graph, and `rows`, (slots,) int64: the row of the stacks that each slot uses.

    `capacity`: how many adapters they take at once.
    """

    def __init__(self, shapes: "Mapping[str, Sequence[int]]", slots: int = 0) -> None:
        self.tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.capacity = min(len(tensor) for tensor in self.tensors.values()) - 1
        self.rows = np.zeros(slots, np.int64)
        self.active: "dict[str, int]" = {}  # row by digest, the most recent at the end

    @classmethod
    def of(cls, shapes: "Iterable[tuple[str, Sequence[int]]]", slots: int = 0) -> "LoraStacks | None":
        """Return stacks for the inputs of a graph, (name, shape) each; None if it takes no adapters."""
        stacks = {name: shape for name, shape in shapes if name.startswith(STACKS)}
        return cls(stacks, slots) if stacks else None

    def misfit(self, adapter: Adapter) -> "str | None":
        """Return why `adapter` does not fit the stacks; None if it does."""
        headless = [name for name in self.tensors if name.startswith(LORA_HEAD) and name not in adapter.matrices]
        if headless:
            return f"it has no {headless[0][len(LORA_HEAD) :]}, which this version takes from the adapter"
        for name, matrix in adapter.matrices.items():
            layer = name.split(".", 1)[1]
            if name not in self.tensors:
                return f"it changes {layer}, which adapters of this version of the model cannot"
            _, *largest = self.tensors[name].shape
            rank, width = (0, 1) if name.startswith(LORA_B) else (1, 0)
            is_head = name.startswith(LORA_HEAD)
            if matrix.shape[width] != largest[width]:
                own, expected = matrix.shape[width] - is_head, largest[width] - is_head  # without the row of the bias
                return f"its {layer} has {own} numbers, and that of this version has {expected}"
            if matrix.shape[rank] > largest[rank]:
                size = matrix.shape[rank]
                has = f"{size} labels" if is_head else f"rank {size}"
                return f"it has {has} in {layer}, and this version takes at most {largest[rank]}"
        return None

    def activate(self, adapter: "Adapter | None", running: "Collection[str]") -> "int | None":
        """Return the row of `adapter`, written there if it was not; None while the adapters `running` need all rows.

        `running`: digests of adapters that must stay where they are.
        """
        if adapter is None:
            return 0
        row = self.active.pop(adapter.digest, None)
        if row is None:
            row = self._free_row(running)
            if row is None:
                return None
            for name, tensor in self.tensors.items():
                tensor[row] = 0
                if name in adapter.matrices:
                    matrix = adapter.matrices[name]
                    tensor[row, : matrix.shape[0], : matrix.shape[1]] = matrix
        self.active[adapter.digest] = row
        return row

    def rows_of(self, adapters: "Sequence[Adapter | None]") -> np.ndarray:
        """Return the row of each of `adapters`, (adapters,) int64; of these at most `capacity` are different."""
        together = {adapter.digest for adapter in adapters if adapter is not None}
        return np.array([self.activate(adapter, together) for adapter in adapters], np.int64)

    def beside(self, feeds: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
        """Return the inputs of a call with the stacks; its rows have no adapter unless LORA_ROWS is among `feeds`."""
        rows = len(next(iter(feeds.values())))
        return {LORA_ROWS: np.zeros(rows, np.int64), **feeds, **self.tensors}

    def _free_row(self, running: "Collection[str]") -> "int | None":
        """Return an unused row, or that of the least recent adapter that is not `running`."""
        if len(self.active) < self.capacity:
            return len(self.active) + 1
        idle = next((digest for digest in self.active if digest not in running), None)
        return None if idle is None else self.active.pop(idle)

"""What an engine with attention over a paged cache needs: all rows of a call one after the other, and tables of blocks.

What a slot holds is a table of blocks; copying a slot is sharing its blocks. Knows shapes; knows no engine, and nothing
about requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ..blocks import Blocks, Growth
from .base import Executor, Geometry, Part, last_of_rows

OPERATOR = "PagedAttention"  # what attention over blocks is called in a graph's file, whatever the engine


def blocks_of(geometry: Geometry, block: int) -> int:
    """How many blocks of `block` tokens an arena has: as many as it says, or enough for all slots to be full."""
    return geometry.blocks or geometry.slots * -(-geometry.max_length // block)


@dataclass(frozen=True)
class Rows:
    """The rows of a call, one after the other; plain lists, which cost less than arrays of so few numbers.

    Of each token `tokens` and `positions`; `wanted`: the places of tokens after which logits are wanted, and `counts`,
    how many of these each part of the call asked for. Of each row: `past`, tokens in the cache before the call, `new`,
    tokens of the call, and `tables`, the blocks that hold both.
    """

    tokens: "Sequence[int]"
    positions: "Sequence[int]"
    wanted: "Sequence[int]"
    counts: "Sequence[int]"
    past: "Sequence[int]"
    new: "Sequence[int]"
    tables: "Sequence[Sequence[int]]"

    @property
    def begins(self) -> "list[int]":
        """Where the tokens of each row begin and, at last, end."""
        return [0, *accumulate(self.new)]

    @property
    def longest(self) -> int:
        """The most tokens of a row after the call."""
        return max(past + new for past, new in zip(self.past, self.new))

    @property
    def places(self) -> "list[slice]":
        """Which of the logits are those of each part."""
        return [slice(end - count, end) for end, count in zip(accumulate(self.counts), self.counts)]


class Paged(Executor):
    """`block`: tokens of a block."""

    blocks: Blocks

    def __init__(self, geometry: Geometry, block: int) -> None:
        super().__init__(geometry)
        self.blocks = Blocks(geometry.slots, blocks_of(geometry, block), block)

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self.run_together([Part(first, tokens, lengths, wanted)])[0]

    def run_together(self, parts: "Sequence[Part]") -> "list[np.ndarray]":
        rows = self._rows(parts)
        logits = self._infer(rows)
        return [logits[index] for index in rows.places]

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        self.blocks.share(source, target, length)

    @abstractmethod
    def _infer(self, rows: Rows) -> np.ndarray:
        """Run the graph: logits (wanted, vocabulary) float32, valid until the next call."""

    @abstractmethod
    def _copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of all layers."""

    def _rows(self, parts: "Sequence[Part]") -> Rows:
        """The rows of all `parts` that somebody waits for; their blocks are then theirs to write."""
        ids: "list[int]" = []
        positions: "list[int]" = []
        wanted: "list[int]" = []
        counts, past, new, tables = [], [], [], []
        for part in parts:
            size, tokens, lengths = part.tokens.shape[1], part.tokens.tolist(), part.lengths.tolist()
            answered = (last_of_rows(part.tokens) if part.wanted is None else part.wanted).tolist()
            begins: "dict[int, int]" = {}
            for row in sorted({place // size for place in answered}):  # a row that nobody waits for is not run
                begins[row] = len(ids)
                ids += tokens[row]
                positions += range(lengths[row], lengths[row] + size)
                past.append(lengths[row])
                new.append(size)
                tables.append(self._table(part.first + row, lengths[row], size))
            wanted += [begins[place // size] + place % size for place in answered]
            counts.append(len(answered))
        return Rows(ids, positions, wanted, counts, past, new, tables)

    def _table(self, slot: int, length: int, new: int) -> "list[int]":
        """The blocks of `slot`, those of `new` more tokens included, which are its own to write."""
        for source, target in self.blocks.write(Growth(slot, length, length + new)):
            self._copy_block(source, target)
        return self.blocks.tables[slot]

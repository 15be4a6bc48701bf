"""Provide the common parts of engines with attention over a paged cache: rows of a call in sequence, block tables.

A slot is a table of blocks; copying a slot shares its blocks. Knows shapes; knows no engine, and nothing about
requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ..block_manager import BlockManager, PendingWrite
from .base import CallPart, Executor, Geometry

# Names of operators in a graph's file, for every engine: attention over blocks, and layers over the states of slots.
OPERATOR = "PagedAttention"
CONVOLUTION, GATED_DELTA, GATED = PAGED_STATES = "PagedCausalConv1D", "PagedGatedDeltaNet", "PagedSelectiveSSM"


def blocks_of(geometry: Geometry, block: int) -> int:
    """Return how many blocks of `block` tokens the cache has: the configured number, or enough to fill all slots."""
    return geometry.blocks or geometry.slots * -(-geometry.max_length // block)


@dataclass(frozen=True)
class PagedRows:
    """Rows of a call, one after the other; plain lists, which cost less than arrays of so few numbers.

    For each token: `tokens` and `positions`. `logits_positions`: indices of the tokens after which logits are needed;
    `counts`: how many of these each part of the call has. For each row: `past`, tokens in the cache before the call,
    `new`, tokens of the call, `tables`, the blocks of both, and `slots`.
    """

    tokens: "Sequence[int]"
    positions: "Sequence[int]"
    logits_positions: "Sequence[int]"
    counts: "Sequence[int]"
    past: "Sequence[int]"
    new: "Sequence[int]"
    tables: "Sequence[Sequence[int]]"
    slots: "Sequence[int]"

    @property
    def begins(self) -> "list[int]":
        """Index at which the tokens of each row begin and, last, the end."""
        return [0, *accumulate(self.new)]

    @property
    def longest(self) -> int:
        """Longest row after the call, in tokens."""
        return max(past + new for past, new in zip(self.past, self.new))

    @property
    def places(self) -> "list[slice]":
        """Rows of the logits that belong to each part."""
        return [slice(end - count, end) for end, count in zip(accumulate(self.counts), self.counts)]


class Paged(Executor):
    """Executor over a paged cache. `block`: tokens of a block."""

    blocks: BlockManager

    def __init__(self, geometry: Geometry, block: int) -> None:
        super().__init__(geometry)
        self.blocks = BlockManager(geometry.slots, blocks_of(geometry, block), block)

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self.run_together([CallPart(first, tokens, lengths, logits_positions)])[0]

    def run_together(self, parts: "Sequence[CallPart]") -> "list[np.ndarray]":
        rows = self._rows(parts)
        logits = self._infer(rows)
        return [logits[index] for index in rows.places]

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        self.blocks.share(source, target, length)

    @abstractmethod
    def _infer(self, rows: PagedRows) -> np.ndarray:
        """Run the graph; return logits (positions, vocabulary) float32, valid until the next call."""

    @abstractmethod
    def _copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values of all layers."""

    def _rows(self, parts: "Sequence[CallPart]") -> PagedRows:
        """Return the rows of `parts` that need logits, with blocks that they may write."""
        ids: "list[int]" = []
        positions: "list[int]" = []
        logits_positions: "list[int]" = []
        counts, past, new, tables, slots = [], [], [], [], []
        for part in parts:
            size, tokens, lengths = part.tokens.shape[1], part.tokens.tolist(), part.lengths.tolist()
            answered = part.logits_indices.tolist()
            begins: "dict[int, int]" = {}
            for row in sorted({place // size for place in answered}):  # a row that needs no logits is not run
                begins[row] = len(ids)
                ids += tokens[row]
                positions += range(lengths[row], lengths[row] + size)
                past.append(lengths[row])
                new.append(size)
                tables.append(self._table(part.first + row, lengths[row], size))
                slots.append(part.first + row)
            logits_positions += [begins[place // size] + place % size for place in answered]
            counts.append(len(answered))
        return PagedRows(ids, positions, logits_positions, counts, past, new, tables, slots)

    def _table(self, slot: int, length: int, new: int) -> "list[int]":
        """Return the blocks of `slot` for `new` more tokens, copied if others share them."""
        for source, target in self.blocks.prepare_write(PendingWrite(slot, length, length + new)):
            self._copy_block(source, target)
        return self.blocks.block_tables[slot]

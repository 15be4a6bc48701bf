"""What an engine with attention over a paged cache needs: all rows of a call one after the other, and tables of blocks.

What a slot holds is a table of blocks; copying a slot is sharing its blocks. Knows shapes; knows no engine, and nothing
about requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from ..blocks import Blocks, Growth
from .base import Executor, Geometry, Part, last_of_rows

BLOCK = 32  # tokens; what OpenVINO's CPU plugin has
DOMAIN, OPERATOR = "build_repo", "PagedAttention"  # what its attention is in the graph's file
# What tells a call where its rows and their keys and values are: inputs of the graph, int32, by their number of axes.
TABLES = {
    "past_lens": 1,
    "subsequence_begins": 1,
    "block_indices": 1,
    "block_indices_begins": 1,
    "max_context_len": 0,
}


def blocks_of(geometry: Geometry) -> int:
    """How many blocks an arena has: as many as it says, or enough for all slots to be full."""
    return geometry.blocks or geometry.slots * -(-geometry.max_length // BLOCK)


class Paged(Executor):
    """`caches`: the keys and the values of each layer, (blocks, ...), in whatever layout and type the engine has."""

    blocks: Blocks

    def __init__(self, geometry: Geometry, caches: Sequence[np.ndarray]) -> None:
        super().__init__(geometry)
        self.caches = caches
        self.blocks = Blocks(geometry.slots, blocks_of(geometry), BLOCK)

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self.run_together([Part(first, tokens, lengths, wanted)])[0]

    def run_together(self, parts: "Sequence[Part]") -> "list[np.ndarray]":
        ids, positions, wanted, past, new, tables, counts = [], [], [], [], [], [], []
        before = 0  # tokens of the parts before
        for part in parts:
            size = part.tokens.shape[1]
            asked = last_of_rows(part.tokens) if part.wanted is None else part.wanted
            rows, places = np.unique(asked // size, return_inverse=True)  # a row that nobody waits for is not run
            lengths = part.lengths[rows]
            tables += [self._table(part.first + row, n, size) for row, n in zip(rows.tolist(), lengths.tolist())]
            ids.append(part.tokens[rows].ravel())
            positions.append((lengths[:, None] + np.arange(size)).ravel())
            wanted.append(before + places * size + asked % size)
            past.append(lengths)
            new.append(np.full(len(rows), size))
            counts.append(len(asked))
            before += len(rows) * size
        held, added = np.concatenate(past), np.concatenate(new)
        feeds = {
            "input_ids": np.concatenate(ids)[None],
            "position_ids": np.concatenate(positions)[None],
            "logits_positions": np.concatenate(wanted),
            "past_lens": held.astype(np.int32),
            "subsequence_begins": np.cumsum([0, *added], dtype=np.int32),
            "block_indices": np.array([block for table in tables for block in table], np.int32),
            "block_indices_begins": np.cumsum([0, *map(len, tables)], dtype=np.int32),
            "max_context_len": np.array((held + added).max(), np.int32),
        }
        return np.split(self._infer(feeds), np.cumsum(counts)[:-1])

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        self.blocks.share(source, target, length)

    @abstractmethod
    def _infer(self, feeds: "Mapping[str, np.ndarray]") -> np.ndarray:
        """Run the graph: logits (positions, vocabulary) float32, valid until the next call."""

    def _table(self, slot: int, length: int, new: int) -> "list[int]":
        """The blocks of `slot`, those of `new` more tokens included, which are its own to write."""
        for source, target in self.blocks.write(Growth(slot, length, length + new)):
            for cache in self.caches:
                cache[target] = cache[source]
        return self.blocks.tables[slot]

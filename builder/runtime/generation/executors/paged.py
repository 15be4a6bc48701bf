"""What an engine with attention over a paged cache needs: all rows of a call one after the other, and tables of blocks.

What a slot holds is a table of blocks; copying a slot is sharing its blocks. Knows shapes; knows no engine, and nothing
about requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from ..blocks import Blocks, Growth
from .base import Executor, Geometry, last_of_rows

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
        new = tokens.shape[1]
        wanted = last_of_rows(tokens) if wanted is None else wanted
        rows, places = np.unique(wanted // new, return_inverse=True)  # a row that nobody waits for is not run
        past = lengths[rows].astype(np.int32)
        tables = [self._table(first + row, length, new) for row, length in zip(rows.tolist(), past.tolist())]
        feeds = {
            "input_ids": tokens[rows].reshape(1, -1),
            "position_ids": (past[:, None] + np.arange(new)).reshape(1, -1),
            "logits_positions": places * new + wanted % new,
            "past_lens": past,
            "subsequence_begins": np.arange(0, (len(rows) + 1) * new, new, dtype=np.int32),
            "block_indices": np.array([block for table in tables for block in table], np.int32),
            "block_indices_begins": np.cumsum([0, *map(len, tables)], dtype=np.int32),
            "max_context_len": np.array(past.max() + new, np.int32),
        }
        return self._infer(feeds)

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

"""Divide the KV cache into blocks that slots allocate as they grow, and share for common prefixes (copy on write).

Knows block numbers; knows no tensors, tokens or engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PendingWrite:
    """Token positions, `start` to before `end`, that a slot is about to write."""

    slot: int
    start: int
    end: int


class OutOfBlocks(RuntimeError):
    """No block is free; the scheduler has to evict or preempt before it runs a call."""


class BlockManager:
    """Block tables of `slots` slots over `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, slots: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.block_tables: "list[list[int]]" = [[] for _ in range(slots)]
        self.ref_counts = [0] * num_blocks
        self.free_blocks = list(range(num_blocks - 1, -1, -1))

    def count_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def count_missing(self, pending_writes: "Iterable[PendingWrite]") -> int:
        """Return how many more blocks must become free before `pending_writes`."""
        needed, copied = 0, Counter[int]()
        for pending in pending_writes:
            table = self.block_tables[pending.slot]
            needed += max(0, self.count_for(pending.end) - len(table))
            for block in table[pending.start // self.block_size : self.count_for(pending.end)]:
                if self.ref_counts[block] - copied[block] > 1:
                    copied[block] += 1
                    needed += 1
        return max(0, needed - len(self.free_blocks))

    def count_used(self, slots: "Iterable[int]") -> int:
        """Return how many distinct blocks `slots` use."""
        return len({block for slot in slots for block in self.block_tables[slot]})

    def prepare_write(self, pending: PendingWrite) -> "list[tuple[int, int]]":
        """Allocate the blocks of a write; return the shared ones to copy first, (from, to). Raises OutOfBlocks."""
        table, needed = self.block_tables[pending.slot], self.count_for(pending.end)
        self.truncate(pending.slot, pending.end)
        copies = []
        for index in range(pending.start // self.block_size, len(table)):
            block = table[index]
            if self.ref_counts[block] > 1:
                self.ref_counts[block] -= 1
                table[index] = self._allocate()
                copies.append((block, table[index]))
        while len(table) < needed:
            table.append(self._allocate())
        return copies

    def truncate(self, slot: int, tokens: int) -> None:
        """Release the blocks of a slot beyond its first `tokens` tokens."""
        table = self.block_tables[slot]
        while len(table) > self.count_for(tokens):
            self._release(table.pop())

    def share(self, source: int, target: int, tokens: int) -> None:
        """Replace the blocks of `target` with those of the first `tokens` tokens of `source`."""
        shared = self.block_tables[source][: self.count_for(tokens)]
        for block in shared:
            self.ref_counts[block] += 1
        self.truncate(target, 0)
        self.block_tables[target] = list(shared)

    def _allocate(self) -> int:
        if not self.free_blocks:
            raise OutOfBlocks(f"all {self.num_blocks} blocks of the cache are in use")
        block = self.free_blocks.pop()
        self.ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if not self.ref_counts[block]:
            self.free_blocks.append(block)

"""Divide cache memory into blocks of a few tokens, which slots take as they grow and share for common prefixes.

A slot has a table of blocks, in the order of its tokens. A block that is in several tables is never written: the next
writer gets a copy of its own. Knows numbers of blocks; knows no tensors, tokens or engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """Range of tokens, `start` to before `end`, that a slot is about to write."""

    slot: int
    start: int
    end: int


class OutOfBlocks(RuntimeError):
    """No block is free; the scheduler has to make room before it runs a call."""


class Blocks:
    """Tables of `slots` slots over `count` blocks of `size` tokens each."""

    def __init__(self, slots: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.tables: "list[list[int]]" = [[] for _ in range(slots)]
        self.users = [0] * count  # number of tables that have each block
        self.unused = list(range(count - 1, -1, -1))

    def of(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.size)

    def missing(self, growths: "Iterable[Growth]") -> int:
        """Return how many more blocks must become free for `growths`; 0 if there is room."""
        needed, left = 0, Counter[int]()  # `left`: number of tables that get a copy
        for growth in growths:
            table = self.tables[growth.slot]
            needed += max(0, self.of(growth.end) - len(table))
            for block in table[growth.start // self.size : self.of(growth.end)]:
                if self.users[block] - left[block] > 1:
                    left[block] += 1
                    needed += 1
        return max(0, needed - len(self.unused))

    def held_by(self, slots: "Iterable[int]") -> int:
        """Return how many blocks the tables of `slots` have, a shared one counted once."""
        return len({block for slot in slots for block in self.tables[slot]})

    def write(self, growth: Growth) -> "list[tuple[int, int]]":
        """Give a slot the blocks that it is about to write; return the blocks to copy first, (from, to).

        Raises OutOfBlocks.
        """
        table, needed = self.tables[growth.slot], self.of(growth.end)
        self.truncate(growth.slot, growth.end)
        copies = []
        for index in range(growth.start // self.size, len(table)):
            block = table[index]
            if self.users[block] > 1:
                self.users[block] -= 1
                table[index] = self._take()
                copies.append((block, table[index]))
        while len(table) < needed:
            table.append(self._take())
        return copies

    def truncate(self, slot: int, tokens: int) -> None:
        """Drop the blocks of a slot beyond its first `tokens` tokens."""
        table = self.tables[slot]
        while len(table) > self.of(tokens):
            self._drop(table.pop())

    def share(self, source: int, target: int, tokens: int) -> None:
        """Give `target` the blocks of the first `tokens` tokens of `source`, and no others."""
        shared = self.tables[source][: self.of(tokens)]
        for block in shared:
            self.users[block] += 1
        self.truncate(target, 0)
        self.tables[target] = list(shared)

    def _take(self) -> int:
        if not self.unused:
            raise OutOfBlocks(f"all {self.count} blocks of the cache are in use")
        block = self.unused.pop()
        self.users[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.unused.append(block)

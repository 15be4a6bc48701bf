"""Allocate slots of the KV cache to running sequences, and track the tokens whose keys and values each slot has.

A decode step runs over one contiguous range of slots, so running sequences are kept close together. A slot that was
freed keeps its content until it is used again: a later prompt that begins with the same tokens reuses it.
Where slots share memory, as blocks, running slots that need memory evict the content of free ones, the oldest first.
The contents of a slot change only here. Knows token ids, slots and blocks; of tensors it knows only how to have a slot
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Blocks, Growth

Copy = Callable[..., None]  # (source, target, length, start=0): Executor.copy


@dataclass(frozen=True)
class Placement:
    """Slot for a prompt, with the keys and values of its first `reused` tokens already there."""

    slot: int
    reused: int


class SlotCache:
    """Tokens of each slot, and which slots are taken."""

    def __init__(
        self, slots: int, max_length: int, copy: Copy, reuse: bool = True, blocks: "Blocks | None" = None
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.taken = [False] * slots
        self.last_used = [0] * slots
        self.max_length = max_length
        self.copy = copy
        self.reuse = reuse
        self.blocks = blocks
        self.clock = 0

    @property
    def free(self) -> int:
        return self.taken.count(False)

    @property
    def usage(self) -> float:
        """Share of the memory that taken slots use, 0 to 1: of the blocks or, without blocks, of the slots."""
        taken = [slot for slot, used in enumerate(self.taken) if used]
        if self.blocks is None:
            return len(taken) / len(self.taken)
        return self.blocks.held_by(taken) / self.blocks.count

    def length(self, slot: int) -> int:
        """Return how many tokens `slot` has."""
        return len(self.tokens[slot])

    def range(self) -> tuple[int, int]:
        """Return the smallest range that includes every taken slot, as (first, end)."""
        taken = [slot for slot, used in enumerate(self.taken) if used]
        return (taken[0], taken[-1] + 1) if taken else (0, 0)

    def place(self, prompt: Sequence[int], reusable: int | None = None) -> Placement:
        """Take a free slot for `prompt`: near the others, then the one with the longest match, then the oldest.

        A longer match in another slot is copied, up to the first `reusable` tokens of the prompt if that is given. At
        least the last token is always left to run, for its logits.
        """
        common = [common_length(prompt, tokens) if self.reuse else 0 for tokens in self.tokens]
        most = len(prompt) - 1 if reusable is None else min(reusable, len(prompt) - 1)
        common = [min(length, most) for length in common]
        slot = self._take(common)
        source = slot if common[slot] == max(common) else common.index(max(common))
        reused = common[source]
        if source != slot and reused:
            self.copy(source, slot, reused)
        self._keep(slot, prompt[:reused])
        return Placement(slot, reused)

    def take(self) -> int:
        """Take a free slot, the nearest to the others, for a beam that will be copied there."""
        slot = self._take([0] * len(self.taken))
        self._keep(slot, ())
        return slot

    def admits(self, prompt: Sequence[int], width: int) -> bool:
        """Return True if there is memory to start a sequence from `prompt`, or `width` beams of it.

        The content of free slots counts as free memory. One block is reserved for each running slot to grow into.
        """
        if self.blocks is None or not any(self.taken):
            return True
        running = [slot for slot, used in enumerate(self.taken) if used]
        common = max(common_length(prompt, self.tokens[slot]) for slot in running) if self.reuse else 0
        needed = self.blocks.of(len(prompt) + 1) - common // self.blocks.size + width - 1 + len(running)
        return self.blocks.held_by(running) + needed <= self.blocks.count

    def has_room(self, growths: Sequence[Growth]) -> bool:
        """Return True if slots can be written without evicting anything."""
        return self.blocks is None or not self.blocks.missing(growths)

    def make_room(self, growths: Sequence[Growth]) -> bool:
        """Evict the content of free slots until `growths` fit; return False if that is not enough."""
        if self.blocks is None:
            return True
        while self.blocks.missing(growths):
            free = [slot for slot, used in enumerate(self.taken) if not used and self.blocks.tables[slot]]
            if not free:
                return False
            self._keep(min(free, key=self.last_used.__getitem__), ())
        return True

    def _keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Truncate `slot` to `tokens`, with which it begins already."""
        self.tokens[slot] = list(tokens)
        if self.blocks is not None:
            self.blocks.truncate(slot, len(tokens))

    def _take(self, common: Sequence[int]) -> int:
        first, last = self.range()

        def order(slot: int) -> tuple[int, int, int]:
            outside = 0 if first == last else max(first - slot, slot - last + 1, 0)  # how much wider the range gets
            return outside, -common[slot], self.last_used[slot]

        slot = min((slot for slot, used in enumerate(self.taken) if not used), key=order)
        self.clock += 1
        self.taken[slot], self.last_used[slot] = True, self.clock
        return slot

    def trim(self, slot: int, length: int) -> None:
        """Drop the tokens of `slot` beyond the first `length`."""
        del self.tokens[slot][length:]

    def release(self, slot: int) -> None:
        """Free `slot`; its content may be reused."""
        self.taken[slot] = False

    def close_hole(self) -> tuple[int, int] | None:
        """Move the last slot of the range to a free one inside it: (from, to), or None if there is no hole.

        Where slots share blocks a hole costs nothing: its row is not run.
        """
        if self.blocks is not None:
            return None
        first, last = self.range()
        inside = [slot for slot in range(first, last) if not self.taken[slot]]
        if not inside:
            return None
        source, target = last - 1, inside[0]
        self.copy(source, target, len(self.tokens[source]))
        self.tokens[target], self.tokens[source] = self.tokens[source], []
        self.taken[source], self.taken[target] = False, True
        self.last_used[target] = self.last_used[source]
        return source, target

    def fork(self, source: int, target: int) -> int:
        """Copy the content of `source` to `target`; return how many positions were copied.

        Positions that both have in common, or whose memory they share, are not copied.
        """
        held = self.tokens[source]
        start = common_length(held, self.tokens[target])
        self.copy(source, target, len(held), start)
        self.tokens[target] = list(held)
        return len(held) - start if self.blocks is None else 0

    def positions(self, first: int, last: int) -> np.ndarray:
        """Return where a step over the slots from `first` to before `last` writes one token of each, (slots,) int64.

        The position is after the slot's tokens; a full slot gives up its last position, see `record`.
        """
        return np.array([min(len(tokens), self.max_length - 1) for tokens in self.tokens[first:last]], np.int64)

    def record(self, first: int, positions: np.ndarray, written: Mapping[int, Sequence[int]]) -> None:
        """Record what a call over the slots from `first` on wrote at `positions`: tokens by slot number.

        In the other slots of the range, tokens from that position on are no longer valid.
        """
        for slot, position in enumerate(positions.tolist(), first):
            tokens = self.tokens[slot]
            del tokens[position:]
            tokens.extend(written.get(slot, ()))


def common_length(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for index, (a, b) in enumerate(zip(prompt, tokens)):
        if a != b:
            return index
    return min(len(prompt), len(tokens))

"""Allocate slots of the KV cache to running sequences, and track the tokens that each slot caches.

A decode step runs over one contiguous range of slots, so running sequences are kept close together. A released slot
keeps its tokens until it is allocated again: a later prompt with the same prefix reuses them. Where slots share blocks,
allocated slots evict the content of free ones, least recently used first. Knows token ids, slots and blocks; knows no
tensors.

Where slots keep states besides (`has_states`), a prefix is reused only if it is all that its slot has, since a state is
that after the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .block_manager import BlockManager, PendingWrite

Copy = Callable[..., None]  # (source, target, length, start=0): Executor.copy


@dataclass(frozen=True)
class Allocation:
    """Slot of a prompt whose first `reused` tokens are cached there."""

    slot: int
    reused: int


class SlotCache:
    """Cached tokens of each slot, and which slots are allocated."""

    def __init__(
        self,
        slots: int,
        max_length: int,
        copy: Copy,
        reuse: bool = True,
        blocks: "BlockManager | None" = None,
        has_states: bool = False,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.keys = [""] * slots
        self.allocated = [False] * slots
        self.last_used = [0] * slots
        self.max_length = max_length
        self.copy = copy
        self.reuse = reuse
        self.blocks = blocks
        self.has_states = has_states
        self.clock = 0

    @property
    def free_slots(self) -> int:
        return self.allocated.count(False)

    @property
    def allocated_slots(self) -> list[int]:
        return [slot for slot, is_allocated in enumerate(self.allocated) if is_allocated]

    @property
    def usage(self) -> float:
        """Share of the blocks, or without blocks of the slots, that is allocated, 0 to 1."""
        if self.blocks is None:
            return self.allocated.count(True) / len(self.allocated)
        return self.blocks.count_used(self.allocated_slots) / self.blocks.num_blocks

    def length(self, slot: int) -> int:
        return len(self.tokens[slot])

    def allocated_range(self) -> tuple[int, int]:
        """Return the smallest range that includes every allocated slot, as (first, end)."""
        slots = self.allocated_slots
        return (slots[0], slots[-1] + 1) if slots else (0, 0)

    def allocate(self, prompt: Sequence[int], reusable: int | None = None, key: str = "") -> Allocation:
        """Allocate a slot for `prompt`: near the others, then with the longest cached prefix, then least recently used.

        A longer prefix in another slot is copied. Prefixes with another `key`, which names the weights that computed
        them, are not reused. At most `reusable` tokens of the prompt are reused, and never its last, whose logits are
        needed.
        """
        limit = len(prompt) - 1 if reusable is None else min(reusable, len(prompt) - 1)
        common = self._common_lengths(prompt, key, limit)
        slot = self._allocate_nearest(common)
        source = slot if common[slot] == max(common) else common.index(max(common))
        reused = common[source]
        if source != slot and reused:
            self.copy(source, slot, reused)
        self._truncate(slot, prompt[:reused])
        self.keys[slot] = key
        return Allocation(slot, reused)

    def allocate_empty(self, key: str = "") -> int:
        """Allocate the free slot nearest to the others, for a beam that will be copied there."""
        slot = self._allocate_nearest([0] * len(self.allocated))
        self._truncate(slot, ())
        self.keys[slot] = key
        return slot

    def can_allocate(self, prompt: Sequence[int], width: int, key: str = "") -> bool:
        """Return True if there are blocks for `prompt` and `width` beams, and one more for each running slot."""
        if self.blocks is None or not any(self.allocated):
            return True
        slots = self.allocated_slots
        lengths = self._common_lengths(prompt, key, len(prompt) - 1)
        common = max(lengths[slot] for slot in slots)
        needed = self.blocks.count_for(len(prompt) + 1) - common // self.blocks.block_size + width - 1 + len(slots)
        return self.blocks.count_used(slots) + needed <= self.blocks.num_blocks

    def can_append(self, pending_writes: Sequence[PendingWrite]) -> bool:
        """Return True if `pending_writes` need no eviction."""
        return self.blocks is None or not self.blocks.count_missing(pending_writes)

    def evict_for(self, pending_writes: Sequence[PendingWrite]) -> bool:
        """Evict free slots until `pending_writes` fit; return False if they do not."""
        if self.blocks is None:
            return True
        while self.blocks.count_missing(pending_writes):
            cached = [slot for slot, table in enumerate(self.blocks.block_tables) if table and not self.allocated[slot]]
            if not cached:
                return False
            self._truncate(min(cached, key=self.last_used.__getitem__), ())
        return True

    def _common_lengths(self, prompt: Sequence[int], key: str, limit: int) -> list[int]:
        """Return how many of the first `limit` tokens of `prompt` each slot can give, computed by the weights `key`."""
        own = [self.reuse and slot_key == key for slot_key in self.keys]
        common = [
            min(common_length(prompt, tokens), limit) if usable else 0 for usable, tokens in zip(own, self.tokens)
        ]
        if self.has_states:
            common = [length if length == len(tokens) else 0 for length, tokens in zip(common, self.tokens)]
        return common

    def _truncate(self, slot: int, tokens: Sequence[int]) -> None:
        """Truncate `slot` to `tokens`, its prefix."""
        self.tokens[slot] = list(tokens)
        if self.blocks is not None:
            self.blocks.truncate(slot, len(tokens))

    def _allocate_nearest(self, common: Sequence[int]) -> int:
        first, last = self.allocated_range()

        def cost(slot: int) -> tuple[int, int, int]:
            outside = 0 if first == last else max(first - slot, slot - last + 1, 0)  # how much wider the range gets
            return outside, -common[slot], self.last_used[slot]

        slot = min((slot for slot, is_allocated in enumerate(self.allocated) if not is_allocated), key=cost)
        self.clock += 1
        self.allocated[slot], self.last_used[slot] = True, self.clock
        return slot

    def trim(self, slot: int, length: int) -> None:
        """Forget the tokens of `slot` beyond the first `length`."""
        del self.tokens[slot][length:]

    def release(self, slot: int) -> None:
        """Free `slot`; its tokens stay cached."""
        self.allocated[slot] = False

    def compact(self) -> tuple[int, int] | None:
        """Move the last slot of the allocated range into a gap; return (from, to), or None without a gap.

        Where slots share blocks a gap costs nothing: its row is not run.
        """
        if self.blocks is not None:
            return None
        first, last = self.allocated_range()
        gaps = [slot for slot in range(first, last) if not self.allocated[slot]]
        if not gaps:
            return None
        source, target = last - 1, gaps[0]
        self.copy(source, target, len(self.tokens[source]))
        self.tokens[target], self.tokens[source] = self.tokens[source], []
        self.keys[target] = self.keys[source]
        self.allocated[source], self.allocated[target] = False, True
        self.last_used[target] = self.last_used[source]
        return source, target

    def fork(self, source: int, target: int) -> int:
        """Copy `source` to `target` beyond their common prefix; return how many positions were copied in memory."""
        tokens = self.tokens[source]
        start = common_length(tokens, self.tokens[target])
        self.copy(source, target, len(tokens), start)
        self.tokens[target] = list(tokens)
        return len(tokens) - start if self.blocks is None else 0

    def write_positions(self, first: int, last: int) -> np.ndarray:
        """Return where a step over the slots `first` to before `last` writes one token of each, (slots,) int64.

        A full slot gives up its last position, see `record`.
        """
        return np.array([min(len(tokens), self.max_length - 1) for tokens in self.tokens[first:last]], np.int64)

    def record(self, first: int, positions: np.ndarray, written: Mapping[int, Sequence[int]]) -> None:
        """Record the tokens that a call over the slots from `first` on wrote at `positions`, by slot.

        In the other slots of the range, tokens from that position on are no longer valid.
        """
        for slot, position in enumerate(positions.tolist(), first):
            tokens = self.tokens[slot]
            del tokens[0 if self.has_states and position < len(tokens) else position :]
            tokens.extend(written.get(slot, ()))


def common_length(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(prompt, tokens)):
        if a != b:
            return index
    return min(len(prompt), len(tokens))

"""Slots are adjacent, reuse the tokens of earlier requests, and are never allocated twice."""

from __future__ import annotations

import numpy as np
import pytest

from builder.runtime.generation.block_manager import BlockManager, PendingWrite
from builder.runtime.generation.slot_cache import SlotCache


class Copies:
    """Stand-in for an executor that records the requested copies."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, ...]] = []

    def __call__(self, *arguments: int) -> None:
        self.copied.append(arguments)


def cache_of(slots: int, reuse: bool = True, copies: Copies | None = None) -> SlotCache:
    return SlotCache(slots, 20, copies or Copies(), reuse)


def hold(cache: SlotCache, slot: int, tokens: list[int]) -> None:
    """Record a call that writes `tokens` to a slot, from its beginning."""
    cache.record(slot, np.zeros(1, np.int64), {slot: tokens})


def test_slot_cache_allocates_the_slot_with_the_longest_prefix() -> None:
    copies = Copies()
    cache = cache_of(3, copies=copies)
    first = cache.allocate([1, 2, 3, 4])
    hold(cache, first.slot, [1, 2, 3, 4, 5])
    cache.release(first.slot)
    other = cache.allocate([9, 9])
    hold(cache, other.slot, [9, 9])
    again = cache.allocate([1, 2, 3, 4, 5, 6])
    assert (again.slot, again.reused) == (first.slot, 5)
    assert copies.copied == []


def test_slot_cache_copies_a_prefix_from_an_allocated_slot() -> None:
    copies = Copies()
    cache = cache_of(2, copies=copies)
    first = cache.allocate([1, 2, 3])
    hold(cache, first.slot, [1, 2, 3])
    second = cache.allocate([1, 2, 7])
    assert second.slot != first.slot
    assert second.reused == cache.length(second.slot) == 2
    assert copies.copied == [(first.slot, second.slot, 2)]


def test_slot_cache_with_states_reuses_whole_slots_alone() -> None:
    cache = SlotCache(3, 20, Copies(), has_states=True)
    first = cache.allocate([1, 2, 3])
    hold(cache, first.slot, [1, 2, 3])
    assert cache.allocate([1, 2, 7]).reused == 0, "the state is that after the third token"
    assert cache.allocate([1, 2, 3, 4]).reused == 3


def test_slot_cache_with_states_counts_blocks_of_whole_slots_alone() -> None:
    blocks = BlockManager(slots=2, num_blocks=4, block_size=4)
    cache = SlotCache(2, 16, Copies(), blocks=blocks, has_states=True)
    running = cache.allocate(list(range(8)))
    blocks.prepare_write(PendingWrite(running.slot, 0, 8))
    hold(cache, running.slot, list(range(8)))
    assert not cache.can_allocate([0, 1, 2, 3, 9, 9], 1), "it shares no block with the running text"
    assert cache.can_allocate(list(range(9)), 1), "it continues the text"


def test_slot_cache_with_states_forgets_a_full_slot_in_a_step_of_others() -> None:
    cache = SlotCache(1, 3, Copies(), has_states=True)
    hold(cache, 0, [1, 2, 3])
    cache.record(0, cache.write_positions(0, 1), {})
    assert cache.tokens[0] == []


def test_slot_cache_never_reuses_the_last_token() -> None:
    cache = cache_of(1)
    hold(cache, 0, [1, 2, 3])
    assert cache.allocate([1, 2, 3]).reused == 2


def test_slot_cache_without_reuse_caches_no_prefix() -> None:
    cache = cache_of(1, reuse=False)
    hold(cache, 0, [1, 2, 3])
    assert cache.allocate([1, 2, 3]).reused == 0


def test_slot_cache_usage_counts_allocated_slots_only() -> None:
    cache = cache_of(4)
    first = cache.allocate([1, 2, 3])
    cache.allocate([4])
    hold(cache, first.slot, [1, 2, 3])
    assert cache.usage == 0.5
    cache.release(first.slot)
    assert cache.usage == 0.25
    in_blocks = SlotCache(2, 20, Copies(), blocks=BlockManager(slots=2, num_blocks=8, block_size=4))
    assert in_blocks.blocks is not None
    slot = in_blocks.allocate([1, 2, 3, 4, 5]).slot
    in_blocks.blocks.prepare_write(PendingWrite(slot, 0, 5))
    assert in_blocks.usage == 2 / 8


def test_slot_cache_allocates_adjacent_slots() -> None:
    cache = cache_of(8)
    taken = [cache.allocate([number]).slot for number in range(4)]
    assert max(taken) - min(taken) == 3
    cache.release(taken[1])
    assert cache.allocate([50]).slot == taken[1], "a hole is filled first"


def test_slot_cache_compacts_from_the_end() -> None:
    copies = Copies()
    cache = cache_of(4, copies=copies)
    slots = sorted(cache.allocate([number]).slot for number in range(3))
    hold(cache, slots[2], [2, 8, 8])
    cache.release(slots[1])
    assert cache.compact() == (slots[2], slots[1])
    assert copies.copied == [(slots[2], slots[1], 3)]
    assert cache.tokens[slots[1]] == [2, 8, 8]
    assert cache.allocated_range() == (slots[0], slots[1] + 1)
    assert cache.compact() is None
    cache.release(slots[0])
    assert cache.compact() is None, "one slot has no holes"


def test_slot_cache_fork_copies_beyond_the_common_prefix() -> None:
    copies = Copies()
    cache = cache_of(2, copies=copies)
    source, target = cache.allocate([1]).slot, cache.allocate_empty()
    hold(cache, source, [1, 2, 3, 4])
    hold(cache, target, [1, 2, 9])
    assert cache.fork(source, target) == 2
    assert copies.copied == [(source, target, 4, 2)]
    assert cache.tokens[target] == [1, 2, 3, 4]


@pytest.mark.parametrize("held", [3, 20])
def test_slot_cache_forgets_tokens_that_a_step_overwrites(held: int) -> None:
    cache = cache_of(1)
    hold(cache, 0, list(range(held)))
    positions = cache.write_positions(0, 1)
    assert positions.tolist() == [min(held, 19)]
    assert cache.length(0) == held, "asking changes nothing"
    cache.record(0, positions, {})
    assert cache.tokens[0] == list(range(min(held, 19))), "what is overwritten is forgotten"

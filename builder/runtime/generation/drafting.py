"""Propose the next tokens of a sequence with a smaller draft model that has the same vocabulary, greedily.

This is speculative decoding (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192). The draft has a KV cache of its
own, which is compared with the sequence at every proposal, so rejected tokens, preempted sequences and sequences that
moved need no special care. Knows sequences by their number and their token ids; does not know how a token is chosen, or
where the sequence runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .block_manager import PendingWrite
from .executors.base import Executor
from .slot_cache import SlotCache, common_length


class Drafter:
    """Draft model over `executor`, which caches as many sequences as it has slots, the least recent evicted first.

    `vocabulary`: number of tokens to choose from; the draft may have more rows in its last matrix.
    """

    def __init__(self, executor: Executor, vocabulary: int) -> None:
        geometry = executor.geometry
        self.executor, self.vocabulary = executor, vocabulary
        self.cache = SlotCache(geometry.slots, geometry.max_length, executor.copy, blocks=executor.blocks)
        self.slots: "dict[int, int]" = {}  # by number of the sequence, the most recent at the end
        self.prefill_budget = 0

    def start_step(self, prefill_budget: int) -> None:
        """Start a step in which the draft prefills at most `prefill_budget` tokens."""
        self.prefill_budget = prefill_budget

    def propose(self, number: int, tokens: "Sequence[int]", count: int) -> "list[int]":
        """Return `count` tokens that may follow the sequence's `tokens`, or none until these are prefilled."""
        slot = self._slot(number, tokens)
        start = self.cache.length(slot)
        chunk = tokens[start : start + self.prefill_budget]
        self.prefill_budget -= len(chunk)
        proposed = [self._run(slot, chunk)] if chunk else []
        if start + len(chunk) < len(tokens):
            return []
        while len(proposed) < count:
            proposed.append(self._run(slot, proposed[-1:]))
        return proposed

    def _slot(self, number: int, tokens: "Sequence[int]") -> int:
        """Return the sequence's slot, trimmed to a prefix of `tokens` without the last, which is to run."""
        slot = self.slots.pop(number, None)
        if slot is None:
            if not self.cache.free_slots:
                self._evict()
            slot = self.cache.allocate(tokens).slot
        else:
            self.cache.trim(slot, min(common_length(tokens, self.cache.tokens[slot]), len(tokens) - 1))
        self.slots[number] = slot
        return slot

    def _run(self, slot: int, tokens: "Sequence[int]") -> int:
        """Run `tokens`, which come next in `slot`, and return the draft's most probable next token."""
        start = self.cache.length(slot)
        while len(self.slots) > 1 and not self.cache.evict_for([PendingWrite(slot, start, start + len(tokens))]):
            self._evict()
        positions = np.array([start], np.int64)
        logits = self.executor.run(slot, np.array([tokens], np.int64), positions)
        self.cache.record(slot, positions, {slot: tokens})
        return int(logits[0, : self.vocabulary].argmax())

    def _evict(self) -> None:
        """Free the slot of the least recent sequence."""
        self.cache.release(self.slots.pop(next(iter(self.slots))))

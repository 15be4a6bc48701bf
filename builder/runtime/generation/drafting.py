"""Guesses how a text goes on: as a smaller model with the same tokens would say it, greedily.

This is speculative decoding (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192), where a guess is kept as prompt
lookup's are: if it is the token that is chosen. What the draft has read of each text is in a cache of its own, which is
compared with the text at every guess: a guess that was not kept, a sequence that gave way or that moved is no matter.
Knows token ids of sequences by their number; knows nothing about how one is chosen, or where the sequence runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .blocks import Growth
from .cache import SlotCache, common_length
from .executors.base import Executor


class Drafter:
    """Over `executor`. Of the sequences that guess by it, as many as it has slots keep theirs: those that guessed last.

    `vocabulary`: how many tokens there are to guess; the draft may have more rows in its last matrix.
    """

    def __init__(self, executor: Executor, vocabulary: int) -> None:
        geometry = executor.geometry
        self.executor, self.vocabulary = executor, vocabulary
        self.cache = SlotCache(geometry.slots, geometry.max_length, executor.copy, blocks=executor.blocks)
        self.slots: "dict[int, int]" = {}  # by number of the sequence, the one that guessed last at the end
        self.unread = 0

    def begin(self, unread: int) -> None:
        """A step begins, in which so many tokens may be read that the draft has not read yet."""
        self.unread = unread

    def guess(self, number: int, tokens: "Sequence[int]", most: int) -> "list[int]":
        """`most` tokens that may come after `tokens` of the sequence; none before all of them are read."""
        slot = self._slot(number, tokens)
        start = self.cache.length(slot)
        piece = tokens[start : start + self.unread]
        self.unread -= len(piece)
        guesses = [self._run(slot, piece)] if piece else []
        if start + len(piece) < len(tokens):
            return []
        while len(guesses) < most:
            guesses.append(self._run(slot, guesses[-1:]))
        return guesses

    def _slot(self, number: int, tokens: "Sequence[int]") -> int:
        """The slot of a sequence, which then holds nothing but a beginning of its tokens; the last is left to run."""
        slot = self.slots.pop(number, None)
        if slot is None:
            if not self.cache.free:
                self._forget()
            slot = self.cache.place(tokens).slot
        else:
            self.cache.trim(slot, min(common_length(tokens, self.cache.tokens[slot]), len(tokens) - 1))
        self.slots[number] = slot
        return slot

    def _run(self, slot: int, tokens: "Sequence[int]") -> int:
        """What the draft says after `tokens`, which come next in `slot`."""
        start = self.cache.length(slot)
        while len(self.slots) > 1 and not self.cache.make_room([Growth(slot, start, start + len(tokens))]):
            self._forget()
        positions = np.array([start], np.int64)
        logits = self.executor.run(slot, np.array([tokens], np.int64), positions)
        self.cache.record(slot, positions, {slot: tokens})
        return int(logits[0, : self.vocabulary].argmax())

    def _forget(self) -> None:
        """Free the slot of the sequence whose last guess is longest ago."""
        self.cache.release(self.slots.pop(next(iter(self.slots))))

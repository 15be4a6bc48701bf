"""Guess the next tokens of a text with a smaller draft model that has the same vocabulary, greedily.

This is speculative decoding (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192). As in prompt lookup, a guess is
kept if it equals the token that is chosen. The draft has a KV cache of its own, which is compared with the text at
every guess, so rejected guesses, preempted sequences and sequences that moved need no special care. The module knows
sequences by their number and their token ids; it does not know how a token is chosen, or where the sequence runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .blocks import Growth
from .cache import SlotCache, common_length
from .executors.base import Executor


class Drafter:
    """Draft model over `executor`, which keeps the sequences that guessed last: as many as it has slots.

    `vocabulary`: number of tokens to choose from; the draft may have more rows in its last matrix.
    """

    def __init__(self, executor: Executor, vocabulary: int) -> None:
        geometry = executor.geometry
        self.executor, self.vocabulary = executor, vocabulary
        self.cache = SlotCache(geometry.slots, geometry.max_length, executor.copy, blocks=executor.blocks)
        self.slots: "dict[int, int]" = {}  # by number of the sequence, the one that guessed last at the end
        self.unread = 0

    def begin(self, unread: int) -> None:
        """Begin a step in which the draft may read at most `unread` tokens that are new to it."""
        self.unread = unread

    def guess(self, number: int, tokens: "Sequence[int]", most: int) -> "list[int]":
        """Return `most` tokens that may follow the sequence's `tokens`, or none until the draft has read them."""
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
        """Return the sequence's slot, trimmed to a prefix of `tokens` that leaves at least the last token to run."""
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
        """Run `tokens`, which come next in `slot`, and return the draft's most probable next token."""
        start = self.cache.length(slot)
        while len(self.slots) > 1 and not self.cache.make_room([Growth(slot, start, start + len(tokens))]):
            self._forget()
        positions = np.array([start], np.int64)
        logits = self.executor.run(slot, np.array([tokens], np.int64), positions)
        self.cache.record(slot, positions, {slot: tokens})
        return int(logits[0, : self.vocabulary].argmax())

    def _forget(self) -> None:
        """Free the slot of the sequence that guessed longest ago."""
        self.cache.release(self.slots.pop(next(iter(self.slots))))

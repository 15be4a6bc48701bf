"""Manage the encoder's work for an encoder-decoder: encode each text once, ahead of its turn.

The keys and values of a text go to a place of an arena, to which the rows of its answer attend. Knows requests and the
executor; knows no threads and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .sequences import Request, Running

if TYPE_CHECKING:
    from .executors.encoding import EncodingExecutor

SIMILAR = 1.3  # texts of one encoder call differ in length by no more than this factor


class Reader:
    """Owner of the arena's places, of which each running sequence has one."""

    def __init__(self, executor: EncodingExecutor, token_budget: int) -> None:
        self.executor = executor
        self.token_budget = token_budget
        self.taken = [False] * executor.geometry.slots

    def unread(self, sequences: "Iterable[Running]") -> "list[Request]":
        """Return the requests of `sequences` whose text is neither encoded nor being encoded, each once, in order."""
        requests = dict.fromkeys(sequence.request for sequence in sequences)
        return [request for request in requests if not request.encoding and request.active]

    def next_batch(self, unread: "list[Request]") -> "list[Request]":
        """Take the first request and others of about its length, up to the token budget, and mark them as encoding."""
        batch = [request for request in unread if _similar(len(request.source), len(unread[0].source))]
        longest = max((len(request.source) for request in batch), default=0)
        batch = batch[: max(1, self.token_budget // max(longest, 1))]
        for request in batch:
            request.encoding = True
        return batch

    def place(self, sequence: Running) -> None:
        """Put the encoded text of `sequence` into a free place of the arena, and let its slots attend to it."""
        request = sequence.request
        sequence.source = self.taken.index(False)
        self.taken[sequence.source] = True
        self.executor.attach(sequence.source, request.encoded)
        request.unplaced -= 1
        if not request.unplaced:
            request.encoded = None  # the arena has it now
        self._assign(sequence)

    def move(self, sequence: Running, slot: int) -> None:
        """Detach `slot`, which no longer belongs to `sequence`; its other slots attend to its place."""
        self.executor.assign(slot, -1, 0)
        self._assign(sequence)

    def _assign(self, sequence: Running) -> None:
        for beam, slot in enumerate(sequence.slots):
            self.executor.assign(slot, sequence.source, beam)

    def release(self, sequence: Running) -> None:
        """Free the place of a sequence that ended."""
        self.taken[sequence.source] = False
        for slot in sequence.slots:
            self.executor.assign(slot, -1, 0)


def _similar(length: int, other: int) -> bool:
    return max(length, other) <= SIMILAR * min(length, other) + 8

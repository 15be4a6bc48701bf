"""Cache the encoder's keys and values of the sources of running requests, each encoded once and ahead of its turn.

Knows requests and the executor; knows no threads and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .sequences import Request, RunningSequence

if TYPE_CHECKING:
    from .executors.encoding import EncodingExecutor

MAX_LENGTH_RATIO = 1.3  # between the first text of an encoder call and any other, in length


class EncoderCache:
    """Places of encoded sources in the executor's memory, one for each running sequence."""

    def __init__(self, executor: EncodingExecutor, token_budget: int) -> None:
        self.executor = executor
        self.token_budget = token_budget
        self.allocated = [False] * executor.geometry.slots

    def unencoded(self, sequences: "Iterable[RunningSequence]") -> "list[Request]":
        """Return the requests of `sequences` whose source is neither encoded nor being encoded, each once, in order."""
        requests = dict.fromkeys(sequence.request for sequence in sequences)
        return [request for request in requests if not request.encoding and request.active]

    def next_batch(self, unencoded: "list[Request]") -> "list[Request]":
        """Mark the first request and others of similar length as encoding, up to the token budget, and return them."""
        if not unencoded:
            return []
        length = len(unencoded[0].source)
        limit = MAX_LENGTH_RATIO * length + 8
        batch = [r for r in unencoded if len(r.source) <= limit and length <= MAX_LENGTH_RATIO * len(r.source) + 8]
        longest = max(len(request.source) for request in batch)
        batch = batch[: max(1, self.token_budget // max(longest, 1))]
        for request in batch:
            request.encoding = True
        return batch

    def allocate(self, sequence: RunningSequence) -> None:
        """Copy the encoded source of `sequence` to a free place, and let its slots attend to it."""
        request = sequence.request
        sequence.source = self.allocated.index(False)
        self.allocated[sequence.source] = True
        self.executor.attach(sequence.source, request.encoded)
        request.waiting_sequences -= 1
        if not request.waiting_sequences:
            request.encoded = None
        self._assign(sequence)

    def detach(self, sequence: RunningSequence, slot: int) -> None:
        """Detach `slot`, from which `sequence` was moved to another."""
        self.executor.assign(slot, -1, 0)
        self._assign(sequence)

    def _assign(self, sequence: RunningSequence) -> None:
        for beam, slot in enumerate(sequence.slots):
            self.executor.assign(slot, sequence.source, beam)

    def release(self, sequence: RunningSequence) -> None:
        """Free the place of a sequence that ended."""
        self.allocated[sequence.source] = False
        for slot in sequence.slots:
            self.executor.assign(slot, -1, 0)

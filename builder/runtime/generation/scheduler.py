"""Schedule the decode loop: the queue, the slots of running sequences, and the calls of each step.

A step drops ended sequences, admits waiting ones, prefills chunks of prompts, and decodes one token of every running
sequence and beam, some with speculative tokens after it. Where slots share blocks, all of this is one call; otherwise
the starts of prompts in adjacent slots can be one call. When blocks run out, the last sequence in queue order is
preempted: it waits again, and is recomputed. Knows requests, slots and which sources are encoded; knows nothing about
logits or sampling. Other threads add to the queue.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .calls import (
    Call,
    PromptChunk,
    decode_call,
    join_prefills,
    next_chunk,
    pending_write,
    pending_writes,
    prefill_call,
    speculative_call,
)
from .sequences import GeneratedSequence, Request, RunningSequence, SequenceStatus
from .slot_cache import SlotCache
from .speculation import Drafter, least_probability
from .stats import Stats

if TYPE_CHECKING:
    from ..lora import LoraStacks
    from .encoder_cache import EncoderCache

MAX_STEP_TOKENS = 64  # of a step with speculative tokens
# With 16, a draft's tokens took longer than they saved (GPT-2 on OpenVINO, two cores).
MAX_DRAFTED_STEP_TOKENS = 8  # of a step with tokens of a draft, but for those of prompt lookup


class QueueFull(RuntimeError):
    """The queue is full."""


class DeadlineExceeded(RuntimeError):
    """The request's timeout passed before its answer was complete."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of the queue and of a step."""

    queue: int  # sequences that may wait; 0: any number
    prefill_tokens: int  # of prompts, in one step; of sources, in one encoder call
    wait_s: float = 0  # how long a request may wait in the queue; 0: no limit


class Scheduler:
    """Owner of the queue and the running sequences. `changed` guards the queue and signals its changes."""

    def __init__(
        self,
        cache: SlotCache,
        limits: SchedulerLimits,
        stats: Stats,
        encoder_cache: EncoderCache | None = None,
        can_speculate: bool = False,
        joins_prefills: bool = False,
        tile_tokens: int = 1,
        drafter: Drafter | None = None,
        lora: LoraStacks | None = None,
    ) -> None:
        """Create an empty queue. `can_speculate`, `joins_prefills`, `tile_tokens`, `lora`: see Executor."""
        self.can_speculate, self.joins_prefills, self.drafter = can_speculate, joins_prefills, drafter
        self.tile_tokens = tile_tokens
        self.cache, self.limits, self.stats, self.encoder_cache = cache, limits, stats, encoder_cache
        self.lora = lora
        self.waiting: list[tuple[int, int, RunningSequence]] = []  # a heap: priority, then arrival
        self.running: list[RunningSequence] = []
        self.changed = threading.Condition()
        self._order = itertools.count()

    @property
    def has_unfinished(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, sequences: Sequence[RunningSequence]) -> None:
        """Queue the sequences of one request. Raises QueueFull."""
        with self.changed:
            if self.limits.queue and len(self.waiting) + len(sequences) > self.limits.queue:
                raise QueueFull(
                    f"{len(self.waiting)} sequences wait already and the limit is {self.limits.queue}; "
                    "send the request again later"
                )
            self.stats.requests += 1
            sequences[0].request.waiting_sequences = len(sequences)
            for sequence in sequences:
                sequence.arrival = next(self._order)
                heapq.heappush(self.waiting, _queue_entry(sequence))
            self.changed.notify_all()

    def has_startable(self) -> bool:
        """Return True if a step would start or drop a waiting sequence."""
        return any(self._is_ready(entry[2]) or not entry[2].request.active for entry in self.waiting)

    def unencoded(self) -> list[Request]:
        """Return the next requests to encode, in order, no further ahead than there are slots."""
        if self.encoder_cache is None:
            return []
        ahead = heapq.nsmallest(len(self.cache.allocated), self.waiting)
        return self.encoder_cache.unencoded(sequence for _, _, sequence in ahead)

    def schedule(self) -> Iterator[Sequence[Call]]:
        """Yield the calls of one step, in groups that run together.

        A group is built after the tokens of the groups before have been chosen.
        """
        self._drop_ended()
        self._admit()
        if self.cache.blocks is not None:
            yield from filter(None, [self._block_calls()])
        else:
            yield from self._prefill()
            yield from ([call] for call in self._decode())
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)

    def finish(self, sequence: RunningSequence) -> None:
        """Free the slots of a sequence that ended."""
        sequence.status = SequenceStatus.FINISHED
        self.running.remove(sequence)
        for slot in sequence.slots:
            self.cache.release(slot)
        if self.encoder_cache is not None:
            self.encoder_cache.release(sequence)

    def refuse(self, request: Request, error: Exception) -> None:
        """Fail a request with `error`; its slots become free with the next step."""
        if request.refuse(error):
            with self.changed:  # also called by the thread that delivers answers
                self.stats.failures += 1

    def refuse_all(self, error: Exception) -> None:
        """Empty the queue, and fail every waiting and running request."""
        with self.changed:
            sequences = [*(entry[2] for entry in self.waiting), *self.running]
            self.waiting, self.running = [], []
        for sequence in sequences:
            self.refuse(sequence.request, error)

    def _is_ready(self, sequence: RunningSequence) -> bool:
        return self.encoder_cache is None or sequence.request.encoded is not None

    def _drop_ended(self) -> None:
        """Refuse requests past their deadline, and drop those that are no longer active."""
        now = time.monotonic()
        with self.changed:
            queued = [sequence for _, _, sequence in self.waiting]
        for sequence in [*queued, *self.running]:
            request = sequence.request
            if request.deadline is not None and now > request.deadline:
                after = sequence.generated
                self.refuse(request, DeadlineExceeded(f"the request's time was over after {after} tokens"))
        self._refuse_overdue(queued, now)
        with self.changed:
            if not all(sequence.request.active for _, _, sequence in self.waiting):
                self.waiting = [entry for entry in self.waiting if entry[2].request.active]
                heapq.heapify(self.waiting)
        for sequence in [sequence for sequence in self.running if not sequence.request.active]:
            self.finish(sequence)

    def _refuse_overdue(self, queued: Sequence[RunningSequence], now: float) -> None:
        """Refuse requests that have waited too long and of which no sequence runs."""
        wait = self.limits.wait_s
        waiting = [sequence.request for sequence in queued if not sequence.was_preempted]
        late = [request for request in waiting if wait and now > request.arrived + wait]
        started = {sequence.request for sequence in self.running} if late else ()
        for request in late:
            if request not in started and request.first_token is None:
                self.refuse(
                    request,
                    DeadlineExceeded(f"the request waited {wait:g} s and its turn did not come; send it again later"),
                )

    def _admit(self) -> None:
        """Start waiting sequences in free slots, in order; the first of a request prefills for its siblings.

        If the next needs more slots than are free, as a search does, later ones get only slots that do not delay it.
        """
        with self.changed:
            skipped, free, spare = [], self.cache.free_slots, len(self.cache.allocated)
            while self.waiting and self.cache.free_slots and spare:
                entry = heapq.heappop(self.waiting)
                sequence = entry[2]
                if sequence.width > min(self.cache.free_slots, spare):
                    skipped.append(entry)
                    spare = min(spare, self._slots_left_by(sequence))
                elif not self._has_memory_for(sequence):
                    skipped.append(entry)  # memory that becomes free is reserved for it
                    break
                elif self._is_ready(sequence) and not self._has_prefilling_sibling(sequence):
                    self._start(sequence)
                    spare -= sequence.width if skipped else 0
                else:
                    skipped.append(entry)
            for entry in skipped:
                heapq.heappush(self.waiting, entry)
            if self.encoder_cache is not None and self.cache.free_slots < free:
                self.changed.notify_all()  # the encoder can encode further ahead

    def _slots_left_by(self, waiting: RunningSequence) -> int:
        """Return how many slots later sequences may use without delaying `waiting`."""
        later = sum(running.width for running in self.running if _queue_order(running) > _queue_order(waiting))
        return max(0, len(self.cache.allocated) - waiting.width - later)

    def _has_memory_for(self, sequence: RunningSequence) -> bool:
        """Return True if there is memory for the sequence's tokens and a row of the stacks for its adapter."""
        key = sequence.request.cache_key
        return self.cache.can_allocate(sequence.tokens, sequence.width, key) and self._adapter_row(sequence) is not None

    def _adapter_row(self, sequence: RunningSequence) -> int | None:
        """Return the row of the stacks with the sequence's adapter; None while others need all rows."""
        if self.lora is None:
            return 0
        return self.lora.activate(sequence.request.adapter, {running.request.cache_key for running in self.running})

    def _has_prefilling_sibling(self, sequence: RunningSequence) -> bool:
        return any(other.request is sequence.request for other in self._active(SequenceStatus.PREFILLING))

    def _start(self, sequence: RunningSequence) -> None:
        request = sequence.request
        row, key = self._adapter_row(sequence), request.cache_key
        placement = self.cache.allocate(sequence.tokens, request.reusable, key)
        sequence.slots = [placement.slot, *(self.cache.allocate_empty(key) for _ in range(sequence.width - 1))]
        if self.lora is not None:
            self.lora.rows[sequence.slots] = row
        if not sequence.was_preempted:
            self.stats.reused_tokens += placement.reused
            self.stats.prompt_tokens += len(request.source or request.prompt)
            if request.queue_seconds is None:
                request.queue_seconds = time.monotonic() - request.arrived
                request.cached_tokens = placement.reused
        self.running.append(sequence)
        if self.encoder_cache is None:
            sequence.status = SequenceStatus.PREFILLING
        else:
            sequence.status = SequenceStatus.DECODING  # its prompt is one token, so it prefills in an ordinary step
            self.encoder_cache.allocate(sequence)

    def _active(self, status: SequenceStatus) -> list[RunningSequence]:
        return [sequence for sequence in self.running if sequence.status is status and sequence.request.active]

    def fast_forward(self, sequence: GeneratedSequence, forced: int) -> bool:
        """Prefill `forced` tokens in one call instead of decoding them; return False if that saves no time.

        The call costs as much as a step of one row, so it saves time if there are at least as many tokens as rows.
        """
        if self.encoder_cache is not None or forced < len(self.running):
            return False
        sequence.status = SequenceStatus.PREFILLING
        return True

    def _prefill(self) -> Iterator[Sequence[Call]]:
        limit = self.limits.prefill_tokens
        for group in join_prefills(self.cache, self._prompt_chunks(limit), limit if self.joins_prefills else 0):
            yield [prefill_call(self.cache, sequence, tokens) for sequence, tokens in group]

    def _prompt_chunks(self, budget: int) -> list[PromptChunk]:
        """Return chunks of prompts, and of forced tokens after them, in order, `budget` tokens at most."""
        chunks = []
        for sequence in self._active(SequenceStatus.PREFILLING):
            if budget <= 0:
                break
            tokens = next_chunk(self.cache, sequence, budget)
            budget -= len(tokens)
            chunks.append((sequence, tokens))
        return chunks

    def _prompt_chunks_beside(self, decoded: int) -> list[PromptChunk]:
        """Return the chunks of prompts for a call that decodes `decoded` tokens as well.

        Both are within the limit of a step, of which prompts have at least half. Few tokens beyond the last full tile
        wait for the next step: with that step's tokens they cost less than in a tile of their own.
        """
        limit = self.limits.prefill_tokens
        chunks = self._prompt_chunks(max(limit - decoded, -(-limit // 2)))
        waiting = sum(len(tokens) for _, tokens in chunks)
        beyond = (decoded + waiting) % self.tile_tokens
        is_small = 2 * beyond <= min(self.tile_tokens, waiting)
        if beyond and is_small and decoded + waiting > self.tile_tokens:
            return self._prompt_chunks(waiting - beyond)
        return chunks

    def _decode(self) -> Iterator[Call]:
        """Yield the call that decodes every sequence and beam, or a speculative one if a single sequence runs."""
        sequences = self._active(SequenceStatus.DECODING)
        if not sequences:
            return
        if len(self.running) == 1 and (speculative := self._speculate(sequences)):  # each would be a call of its own
            yield from speculative
            return
        self._compact()
        yield decode_call(self.cache, sequences)

    def _block_calls(self) -> Sequence[Call]:
        """Return the calls of a step over blocks, which run together; preempt sequences if blocks run out.

        Decoding comes first: `record` then truncates the slots of its range before prompts write to theirs.
        """
        while True:
            sequences = self._active(SequenceStatus.DECODING)
            chunks = self._prompt_chunks_beside(sum(sequence.width for sequence in sequences))
            if self.cache.evict_for(pending_writes(self.cache, sequences, chunks)):
                break
            self._preempt()
        speculative = [] if chunks else self._speculate(sequences)
        others = [sequence for sequence in sequences if all(sequence is not call.sequences[0] for call in speculative)]
        writes = [*pending_writes(self.cache, others, ()), *map(pending_write, speculative)]
        if speculative and not self.cache.can_append(writes):
            speculative, others = [], sequences  # cached prefixes are worth more than speculation
        decode = [decode_call(self.cache, others)] if others else []
        return [*decode, *speculative, *(prefill_call(self.cache, sequence, tokens) for sequence, tokens in chunks)]

    def _speculate(self, sequences: Sequence[RunningSequence]) -> list[Call]:
        """Return speculative calls of sequences, in order, while a step decodes at most `MAX_STEP_TOKENS` tokens."""
        rows = sum(sequence.width for sequence in sequences)
        if not self.can_speculate or rows >= MAX_STEP_TOKENS:
            return []
        calls: list[Call] = []
        budget, least = MAX_STEP_TOKENS - rows, least_probability(rows)
        if self.drafter is not None:
            self.drafter.start_step(self.limits.prefill_tokens, max(0, MAX_DRAFTED_STEP_TOKENS - rows))
        for sequence in sequences:
            call = speculative_call(self.cache, sequence, budget, least, self.drafter)
            if call is not None:
                calls.append(call)
                budget -= call.tokens.shape[1] - 1
        return calls

    def _preempt(self) -> None:
        """Move the last running sequence in queue order back to the queue; its slots may be evicted."""
        last = max(self.running, key=_queue_order)
        self.running.remove(last)
        for slot in last.slots:
            self.cache.release(slot)
        last.restart()
        last.status = SequenceStatus.WAITING
        with self.changed:
            heapq.heappush(self.waiting, _queue_entry(last))
        self.stats.preemptions += 1

    def _compact(self) -> None:
        """Move sequences into the gaps of finished ones, unless waiting sequences can start there."""
        if any(self._is_ready(entry[2]) for entry in self.waiting):
            return
        while (moved := self.cache.compact()) is not None:
            source, target = moved
            for sequence in self.running:
                if source in sequence.slots:
                    sequence.slots[sequence.slots.index(source)] = target
                    if self.encoder_cache is not None:
                        self.encoder_cache.detach(sequence, source)


def _queue_order(sequence: RunningSequence) -> tuple[int, int]:
    """Return the position of a sequence in the queue: priority, then arrival."""
    return sequence.request.options.priority, sequence.arrival


def _queue_entry(sequence: RunningSequence) -> tuple[int, int, RunningSequence]:
    return (*_queue_order(sequence), sequence)

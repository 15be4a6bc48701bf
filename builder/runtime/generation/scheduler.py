"""Schedule the decode loop: the queue, the slots of its sequences, and the calls of each step.

A step drops what ended, admits waiting sequences, and runs a bounded piece of prefill and then one token of every
running sequence and beam, some with guessed tokens after it. Where slots share memory in blocks, all of this is one
call; where the executor joins them, the starts of prompts in adjacent slots are one call. When blocks run out, the last
sequence in the order of the queue is preempted: it waits again, and is recomputed from its tokens. Knows requests,
slots and, for encoder-decoders, whose text has been encoded; knows nothing about logits, sampling or threads, except
that others add to the queue concurrently.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cache import SlotCache
from .calls import Call, PromptPiece, growth, growths, guess, joined, piece, prefill, step
from .drafting import Drafter
from .errors import DeadlineExceeded, QueueFull
from .sequences import GeneratedSequence, Request, Running, SequenceStatus
from .stats import Stats

if TYPE_CHECKING:
    from .reading import Reader

FEW = 8  # tokens of a call with guesses: with 16, guesses took longer than they saved (GPT-2 on OpenVINO, two cores)


@dataclass(frozen=True)
class Limits:
    """Limits of the queue, and of the prompt tokens that run between two steps."""

    queue: int  # sequences that may wait; 0: any number
    prefill_tokens: int  # of prompts, between two decode steps; of texts, in one encoder call
    wait_s: float = 0  # how long a request may wait for its turn; 0: no limit


class Scheduler:
    """Owner of the queue and the running sequences. `changed` guards the queue and signals its changes."""

    def __init__(
        self,
        cache: SlotCache,
        limits: Limits,
        stats: Stats,
        reader: Reader | None = None,
        guesses: bool = False,
        joins: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        """Create an empty queue. `guesses`, `joins`: what the executor supports, see Executor.

        `drafter`: guesses where no text repeats.
        """
        self.guesses, self.joins, self.drafter = guesses, joins, drafter
        self.cache, self.limits, self.stats, self.reader = cache, limits, stats, reader
        self.waiting: list[tuple[int, int, Running]] = []  # a heap: priority, then arrival
        self.running: list[Running] = []
        self.changed = threading.Condition()
        self._order = itertools.count()

    @property
    def busy(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, sequences: Sequence[Running]) -> None:
        """Queue the sequences of one request. Raises QueueFull."""
        with self.changed:
            if self.limits.queue and len(self.waiting) + len(sequences) > self.limits.queue:
                raise QueueFull(
                    f"{len(self.waiting)} sequences wait already and the limit is {self.limits.queue}; "
                    "send the request again later"
                )
            self.stats.requests += 1
            sequences[0].request.unplaced = len(sequences)
            for sequence in sequences:
                sequence.turn = next(self._order)
                heapq.heappush(self.waiting, _entry(sequence))
            self.changed.notify_all()

    def startable(self) -> bool:
        """Return True if a step could do something for a waiting sequence."""
        return any(self._ready(entry[2]) or not entry[2].request.active for entry in self.waiting)

    def unread(self) -> list[Request]:
        """Return the requests that the encoder has yet to read, in order, no further ahead than there are slots."""
        if self.reader is None:
            return []
        ahead = heapq.nsmallest(len(self.cache.taken), self.waiting)
        return self.reader.unread(sequence for _, _, sequence in ahead)

    def schedule(self) -> Iterator[Sequence[Call]]:
        """Yield the calls of one step: those that run together, then the others.

        The later calls are built when the tokens of the earlier ones have been chosen.
        """
        self._drop()
        self._admit()
        if self.cache.blocks is not None:
            yield from filter(None, [self._together()])
        else:
            yield from self._prefill()
            yield from ([call] for call in self._decode())
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)

    def finish(self, sequence: Running) -> None:
        """Free the slots of a sequence that ended."""
        sequence.status = SequenceStatus.FINISHED
        self.running.remove(sequence)
        for slot in sequence.slots:
            self.cache.release(slot)
        if self.reader is not None:
            self.reader.release(sequence)

    def refuse(self, request: Request, error: Exception) -> None:
        """Send a client the one error of its request; its slots become free with the next step."""
        if request.refuse(error):
            with self.changed:  # the thread that writes answers refuses too
                self.stats.failures += 1

    def refuse_all(self, error: Exception) -> None:
        """Empty the queue and fail every waiting and running request."""
        with self.changed:
            left = [*(entry[2] for entry in self.waiting), *self.running]
            self.waiting, self.running = [], []
        for sequence in left:
            self.refuse(sequence.request, error)

    def _ready(self, sequence: Running) -> bool:
        return self.reader is None or sequence.request.encoded is not None

    def _drop(self) -> None:
        """Refuse requests past their deadline, and drop those that are no longer active."""
        now = time.monotonic()
        with self.changed:
            queued = [sequence for _, _, sequence in self.waiting]
        for sequence in [*queued, *self.running]:
            request = sequence.request
            if request.deadline is not None and now > request.deadline:
                after = sequence.generated
                self.refuse(request, DeadlineExceeded(f"the request's time was over after {after} tokens"))
        self._refuse_late(queued, now)
        with self.changed:
            if not all(sequence.request.active for _, _, sequence in self.waiting):
                self.waiting = [entry for entry in self.waiting if entry[2].request.active]
                heapq.heapify(self.waiting)
        for sequence in [sequence for sequence in self.running if not sequence.request.active]:
            self.finish(sequence)

    def _refuse_late(self, queued: Sequence[Running], now: float) -> None:
        """Refuse requests that have waited too long for their turn, if none of their sequences runs."""
        wait = self.limits.wait_s
        waiting = [sequence.request for sequence in queued if not sequence.restarted]  # these had their turn
        late = [request for request in waiting if wait and now > request.arrived + wait]
        started = {sequence.request for sequence in self.running} if late else ()
        for request in late:
            if request not in started and request.first_token is None:
                self.refuse(
                    request,
                    DeadlineExceeded(f"the request waited {wait:g} s and its turn did not come; send it again later"),
                )

    def _admit(self) -> None:
        """Give free slots to waiting sequences, in order; the first of a request prefills for its siblings.

        If the next needs more slots than are free, as a search does, those after it get only the slots that it leaves.
        """
        with self.changed:
            skipped, free, spare = [], self.cache.free, len(self.cache.taken)
            while self.waiting and self.cache.free and spare:
                entry = heapq.heappop(self.waiting)
                sequence = entry[2]
                if sequence.width > min(self.cache.free, spare):
                    skipped.append(entry)
                    spare = min(spare, self._left_by(sequence))
                elif not self.cache.admits(sequence.tokens, sequence.width):
                    skipped.append(entry)  # it is the next: freed memory is kept for it
                    break
                elif self._ready(sequence) and not self._sibling_prefills(sequence):
                    self._start(sequence)
                    spare -= sequence.width if skipped else 0
                else:
                    skipped.append(entry)
            for entry in skipped:
                heapq.heappush(self.waiting, entry)
            if self.reader is not None and self.cache.free < free:
                self.changed.notify_all()  # the encoder may read on

    def _left_by(self, waiting: Running) -> int:
        """Return how many slots later sequences may take without delaying `waiting`."""
        later = sum(running.width for running in self.running if _turn(running) > _turn(waiting))
        return max(0, len(self.cache.taken) - waiting.width - later)

    def _sibling_prefills(self, sequence: Running) -> bool:
        return any(other.request is sequence.request for other in self._active(SequenceStatus.PREFILLING))

    def _start(self, sequence: Running) -> None:
        request = sequence.request
        placement = self.cache.place(sequence.tokens, request.reusable)
        sequence.slots = [placement.slot, *(self.cache.take() for _ in range(sequence.width - 1))]
        if not sequence.restarted:
            self.stats.reused_tokens += placement.reused
            self.stats.prompt_tokens += len(request.source or request.prompt)
            if request.queue_seconds is None:
                request.queue_seconds = time.monotonic() - request.arrived
                request.cached_tokens = placement.reused
        self.running.append(sequence)
        if self.reader is None:
            sequence.status = SequenceStatus.PREFILLING
        else:
            sequence.status = SequenceStatus.DECODING  # its prompt is one token: a step like any other
            self.reader.place(sequence)

    def _active(self, status: SequenceStatus) -> list[Running]:
        return [sequence for sequence in self.running if sequence.status is status and sequence.request.active]

    def fast_forward(self, sequence: GeneratedSequence, forced: int) -> bool:
        """Start to run `forced` known tokens in their own call instead of steps; return False if that does not pay.

        Such a call costs as much as a step of one row: it pays for a row that would need at least as many steps as
        there are rows.
        """
        if self.reader is not None or forced < len(self.running):
            return False
        sequence.status = SequenceStatus.PREFILLING
        return True

    def _prefill(self) -> Iterator[Sequence[Call]]:
        for group in joined(self.cache, self._pieces(), self.limits.prefill_tokens if self.joins else 0):
            yield [prefill(self.cache, sequence, tokens) for sequence, tokens in group]

    def _pieces(self) -> list[PromptPiece]:
        """Return pieces of prompts, and of known tokens after them, first come first, up to the limit of a step."""
        pieces, budget = [], self.limits.prefill_tokens
        for sequence in self._active(SequenceStatus.PREFILLING):
            if budget <= 0:
                break
            tokens = piece(self.cache, sequence, budget)
            budget -= len(tokens)
            pieces.append((sequence, tokens))
        return pieces

    def _decode(self) -> Iterator[Call]:
        """Yield a call with one token of every sequence and beam past its prompt, or the calls of one with a guess."""
        sequences = self._active(SequenceStatus.DECODING)
        if not sequences:
            return
        if len(self.running) == 1 and (guesses := self._guess(sequences)):  # with more rows its own call costs more
            yield from guesses
            return
        self._close_holes()
        yield step(self.cache, sequences)

    def _together(self) -> Sequence[Call]:
        """Return the calls of one run over blocks: steps, guesses and prompts, so that prompts share a weight pass.

        Steps come first: they end the slots of their range where they are, and prompts go on from there.
        """
        while True:
            sequences, pieces = self._active(SequenceStatus.DECODING), self._pieces()
            if self.cache.make_room(growths(self.cache, sequences, pieces)):
                break
            self._preempt()
        guesses = [] if pieces else self._guess(sequences)
        steps = [sequence for sequence in sequences if all(sequence is not call.sequences[0] for call in guesses)]
        if guesses and not self.cache.has_room([*growths(self.cache, steps, ()), *map(growth, guesses)]):
            guesses, steps = [], sequences  # reusable content of free slots is worth more than a guess
        calls = [step(self.cache, steps)] if steps else []
        return [*calls, *guesses, *(prefill(self.cache, sequence, tokens) for sequence, tokens in pieces)]

    def _guess(self, sequences: Sequence[Running]) -> list[Call]:
        """Return steps of sequences with a guess, first come first, while a run has at most `FEW` tokens."""
        calls: list[Call] = []
        left = FEW - sum(sequence.width for sequence in sequences) if self.guesses else 0
        if self.drafter is not None:
            self.drafter.begin(self.limits.prefill_tokens)
        for sequence in sequences:
            if left > 0 and (call := guess(self.cache, sequence, left, self.drafter)) is not None:
                calls.append(call)
                left -= call.tokens.shape[1] - 1
        return calls

    def _preempt(self) -> None:
        """Preempt the last sequence in the order of the queue; the content of its slots may be evicted."""
        last = max(self.running, key=_turn)
        self.running.remove(last)
        for slot in last.slots:
            self.cache.release(slot)
        last.restart()
        last.status = SequenceStatus.WAITING
        with self.changed:
            heapq.heappush(self.waiting, _entry(last))
        self.stats.preemptions += 1

    def _close_holes(self) -> None:
        """Move sequences into the holes that finished ones left, unless waiting sequences can take those."""
        if any(self._ready(entry[2]) for entry in self.waiting):
            return
        while (moved := self.cache.close_hole()) is not None:
            source, target = moved
            for sequence in self.running:
                if source in sequence.slots:
                    sequence.slots[sequence.slots.index(source)] = target
                    if self.reader is not None:
                        self.reader.move(sequence, source)


def _turn(sequence: Running) -> tuple[int, int]:
    """Return the order of a sequence in the queue: priority, then arrival."""
    return sequence.request.options.priority, sequence.turn


def _entry(sequence: Running) -> tuple[int, int, Running]:
    return (*_turn(sequence), sequence)

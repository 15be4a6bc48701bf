"""Who runs: the queue, the slots that its sequences are given, and the calls of each step.

A step drops what is over, admits what waits, runs a bounded piece of prefill and then one token of every running
sequence and beam, of some with tokens that may follow it; where slots share memory in blocks, all in one call, and
where the executor joins them, prompts that begin in slots beside one another. Where the memory of blocks runs out, the
last in the order of the queue gives way: it waits again, and is computed again from its tokens. Knows requests, slots
and, for encoder-decoders, whose text has been read; knows nothing about logits, sampling or threads, except that others
add to the queue while it is looked at.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cache import SlotCache
from .calls import Call, PromptPiece, growth, growths, guess, joined, piece, prefill, step
from .drafting import Drafter
from .errors import DeadlineExceeded, QueueFull
from .reading import Reader
from .sequences import GeneratedSequence, Request, Running, SequenceStatus
from .stats import Stats

FEW = 8  # tokens of a call with guesses: with 16, guesses took longer than they saved (GPT-2 on OpenVINO, two cores)


@dataclass(frozen=True)
class Limits:
    """What may wait, and how much of the prompts is read between two steps."""

    queue: int  # sequences that may wait; 0: any number
    prefill_tokens: int  # of prompts, between two decode steps; of texts, in one encoder call
    wait_s: float = 0  # how long a request may wait for its turn; 0: for ever


class Scheduler:
    """Owns the queue and the sequences that run. `changed` guards the queue and tells who waits for it."""

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
        """`guesses`: whether rows may run tokens ahead; `joins`: whether beginnings run as one call; see Executor.
        `drafter`: what guesses where no text repeats.
        """
        self.guesses, self.joins, self.drafter = guesses, joins, drafter
        self.cache, self.limits, self.stats, self.reader = cache, limits, stats, reader
        self.waiting: list[tuple[int, int, Running]] = []  # a heap: priority, then arrival
        self.running: list[Running] = []
        self.changed = threading.Condition()
        self._order = itertools.count()

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
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
        """Whether a step could do something for a sequence that waits."""
        return any(self._ready(entry[2]) or not entry[2].request.active for entry in self.waiting)

    def unread(self) -> list[Request]:
        """What the encoder has yet to read, in order, no further ahead than there are slots."""
        if self.reader is None:
            return []
        ahead = heapq.nsmallest(len(self.cache.taken), self.waiting)
        return self.reader.unread(sequence for _, _, sequence in ahead)

    def schedule(self) -> Iterator[Sequence[Call]]:
        """The calls of one step: those that run together, and then others, which are made when the tokens of the ones
        before them have been chosen."""
        self._drop()
        self._admit()
        if self.cache.blocks is not None:
            yield from filter(None, [self._together()])
        else:
            yield from self._prefill()
            yield from ([call] for call in self._decode())
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)

    def finish(self, sequence: Running) -> None:
        """Free the slots of a sequence that is over."""
        sequence.status = SequenceStatus.FINISHED
        self.running.remove(sequence)
        for slot in sequence.slots:
            self.cache.release(slot)
        if self.reader is not None:
            self.reader.release(sequence)

    def refuse(self, request: Request, error: Exception) -> None:
        """Tell a client the one error of its request; its slots are free with the next step."""
        if request.refuse(error):
            with self.changed:  # the thread that writes answers refuses too
                self.stats.failures += 1

    def refuse_all(self, error: Exception) -> None:
        """Empty the queue and stop all that runs."""
        with self.changed:
            left = [*(entry[2] for entry in self.waiting), *self.running]
            self.waiting, self.running = [], []
        for sequence in left:
            self.refuse(sequence.request, error)

    def _ready(self, sequence: Running) -> bool:
        return self.reader is None or sequence.request.encoded is not None

    def _drop(self) -> None:
        """Refuse requests whose time is over, and forget those that nobody waits for."""
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
        """Refuse requests that have waited too long for their turn, of which nothing runs."""
        wait = self.limits.wait_s
        waiting = [sequence.request for sequence in queued if not sequence.restarted]  # its turn had come
        late = [request for request in waiting if wait and now > request.arrived + wait]
        started = {sequence.request for sequence in self.running} if late else ()
        for request in late:
            if request not in started and request.first_token is None:
                self.refuse(
                    request,
                    DeadlineExceeded(f"the request waited {wait:g} s and its turn did not come; send it again later"),
                )

    def _admit(self) -> None:
        """Give free slots to the sequences that wait, in order; the first of a request prefills for its siblings.

        Where the next needs more slots than are free, as a search does, those after it may only have what it leaves.
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
                    skipped.append(entry)  # it is the next: what comes free is kept for it
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
        """Slots that later sequences may have, so that it begins when those before it have ended."""
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
        """Whether `forced` tokens that are known go through one call of their own, and no steps.

        Such a call costs as much as a step of one row: it is for a row that would need more steps than there are rows.
        """
        if self.reader is not None or forced < len(self.running):
            return False
        sequence.status = SequenceStatus.PREFILLING
        return True

    def _prefill(self) -> Iterator[Sequence[Call]]:
        for group in joined(self.cache, self._pieces(), self.limits.prefill_tokens if self.joins else 0):
            yield [prefill(self.cache, sequence, tokens) for sequence, tokens in group]

    def _pieces(self) -> list[PromptPiece]:
        """Pieces of prompts, and of what is known to follow, first come first, up to the limit of a step."""
        pieces, budget = [], self.limits.prefill_tokens
        for sequence in self._active(SequenceStatus.PREFILLING):
            if budget <= 0:
                break
            tokens = piece(self.cache, sequence, budget)
            budget -= len(tokens)
            pieces.append((sequence, tokens))
        return pieces

    def _decode(self) -> Iterator[Call]:
        """One token of every sequence and beam that is past its prompt, in one call."""
        sequences = self._active(SequenceStatus.DECODING)
        if not sequences:
            return
        if len(self.running) == 1 and (guesses := self._guess(sequences)):  # among others a call of its own costs more
            yield from guesses
            return
        self._close_holes()
        yield step(self.cache, sequences)

    def _together(self) -> Sequence[Call]:
        """The same for one run, within the blocks that there are: a piece of a prompt then costs no reading of the
        weights of its own.

        The step comes first: it ends the slots of its range where they stand, and prompts go on from there.
        """
        while True:
            sequences, pieces = self._active(SequenceStatus.DECODING), self._pieces()
            if self.cache.make_room(growths(self.cache, sequences, pieces)):
                break
            self._preempt()
        guesses = [] if pieces else self._guess(sequences)
        steps = [sequence for sequence in sequences if all(sequence is not call.sequences[0] for call in guesses)]
        if guesses and not self.cache.has_room([*growths(self.cache, steps, ()), *map(growth, guesses)]):
            guesses, steps = [], sequences  # what free slots remember is worth more than a guess
        calls = [step(self.cache, steps)] if steps else []
        return [*calls, *guesses, *(prefill(self.cache, sequence, tokens) for sequence, tokens in pieces)]

    def _guess(self, sequences: Sequence[Running]) -> list[Call]:
        """Steps of those that have a guess, the first come first, while all together run no more than `FEW` tokens."""
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
        """Let the last in the order of the queue wait again; what its slots hold may be forgotten."""
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
        """Move sequences into the holes that finished ones left, unless others wait for those."""
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
    """By what sequences are ordered: priority, then arrival."""
    return sequence.request.options.priority, sequence.turn


def _entry(sequence: Running) -> tuple[int, int, Running]:
    return (*_turn(sequence), sequence)

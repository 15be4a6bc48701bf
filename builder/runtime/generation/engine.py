"""The decode loop: continuous batching over a fixed arena of slots.

Each step drops what was cancelled, admits what waits, runs a bounded piece of prefill and then one token of every
running sequence and beam. Who ends frees its slots in that step. What an encoder reads is encoded by a thread of its
own, ahead of its turn. Knows token ids and an executor; knows nothing about Triton, tensors of requests, or how a
prompt was made.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .beams import reorder
from .cache import SlotTable, common_length
from .executor import CrossAttending, Executor
from .reading import Reader
from .sampling import Choice, Sampler, choose
from .sequences import Beams, GeneratedSequence, Piece, Request, Running


@dataclass
class Stats:
    """Counts since the start, and what runs now."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    failures: int = 0
    steps: int = 0
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    token_seconds: float = 0.0
    later_tokens: int = 0
    encoded_tokens: int = 0
    encoder_calls: int = 0
    moved_positions: int = 0  # of beams' keys and values
    running: int = 0
    waiting: int = 0
    slots: int = 0
    healthy: int = 1


class QueueFull(RuntimeError):
    """No room for another request."""


class DeadlineExceeded(RuntimeError):
    """The request's time was over before its answer was complete."""


class EngineFailed(RuntimeError):
    """A step failed: nothing that runs or waits can be answered."""


@dataclass(frozen=True)
class Limits:
    queue: int  # requests that may wait
    prefill_tokens: int  # of prompts, between two decode steps; of texts, in one encoder call


class Engine:
    """Owns the executor, the slots and the thread that steps them."""

    def __init__(self, executor: Executor, limits: Limits, reuse_prefixes: bool = True) -> None:
        geometry = executor.geometry
        self.executor = executor
        self.reader = Reader(executor, limits.prefill_tokens) if isinstance(executor, CrossAttending) else None
        self.limits = limits
        self.table = SlotTable(geometry.slots, geometry.max_length, reuse_prefixes and self.reader is None)
        self.waiting: "list[tuple[int, int, Running]]" = []  # a heap: priority, then arrival
        self.prefilling: "list[Running]" = []
        self.decoding: "list[Running]" = []
        self.stats = Stats(slots=geometry.slots)
        self.failure: "Exception | None" = None
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._loop, name="decode loop", daemon=True)]
        if self.reader is not None:
            self._threads.append(threading.Thread(target=self._encode_loop, name="encoder", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the loop after the step that runs; requests that are left get an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._fail_all(EngineFailed("the model was unloaded before this request was answered"))

    def submit(self, sequences: "Sequence[Running]") -> None:
        """Queue the sequences of one request. Raises QueueFull, or EngineFailed when the loop is dead."""
        with self._changed:
            if self.failure is not None:
                raise EngineFailed(f"the decode loop failed earlier: {self.failure!r}; reload the model")
            if len(self.waiting) + len(sequences) > self.limits.queue:
                raise QueueFull(
                    f"{len(self.waiting)} sequences wait already and the limit is {self.limits.queue}; "
                    "send the request again later"
                )
            self.stats.requests += 1
            sequences[0].request.unplaced = len(sequences)
            for sequence in sequences:
                entry = (sequence.request.options.priority, next(self._order), sequence)
                heapq.heappush(self.waiting, entry)
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self.prefilling or self.decoding or self._startable() or self._stopping):
                    self._changed.wait(0.05 if self.waiting else None)
                if self._stopping:
                    return
            if not self._guarded(self.step):
                return

    def _encode_loop(self) -> None:
        while True:
            with self._changed:
                while not (self._unread() or self._stopping or self.failure):
                    self._changed.wait()
                if self._stopping or self.failure:
                    return
            if not self._guarded(self.encode):
                return

    def _guarded(self, work: "Callable[[], None]") -> bool:
        """Do `work`; False where it failed, which everybody who waits or runs is told."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self.failure, self.stats.healthy = error, 0
                self._changed.notify_all()
            self._fail_all(EngineFailed(f"the decode loop failed: {error!r}"))
            return False
        return True

    def step(self) -> None:
        """One turn of the loop."""
        self._drop()
        self._admit()
        self._prefill()
        self._decode()
        self.stats.steps += 1
        self.stats.running = len(self.prefilling) + len(self.decoding)
        self.stats.waiting = len(self.waiting)

    def encode(self) -> None:
        """Run the encoder once, over the text whose turn is next and others of about its length."""
        assert self.reader is not None
        with self._changed:
            batch = self.reader.next_batch(self._unread())
        if not batch:
            return
        encoded = self.reader.executor.encode([request.source for request in batch])
        with self._changed:
            for request, result in zip(batch, encoded):
                request.encoded = result
            self.stats.encoder_calls += 1
            self.stats.encoded_tokens += sum(len(request.source) for request in batch)
            self._changed.notify_all()

    def _unread(self) -> "list[Request]":
        """What the encoder has yet to read, in order, no further ahead than there are slots."""
        if self.reader is None:
            return []
        ahead = heapq.nsmallest(len(self.table.tokens), self.waiting)
        return self.reader.unread(sequence for _, _, sequence in ahead)

    def _startable(self) -> bool:
        """Whether a step could do something for a sequence that waits."""
        return any(self._ready(entry[2]) or entry[2].request.cancelled for entry in self.waiting)

    def _ready(self, sequence: Running) -> bool:
        return self.reader is None or sequence.request.encoded is not None

    def _drop(self) -> None:
        """Forget cancelled requests, and refuse those whose time is over."""
        now = time.monotonic()
        with self._changed:
            queued = [sequence for _, _, sequence in self.waiting]
        for sequence in [*queued, *self.prefilling, *self.decoding]:
            request = sequence.request
            if request.deadline is not None and now > request.deadline and not request.cancelled:
                request.cancelled = True
                done = sequence.generated
                self._fail(request, DeadlineExceeded(f"the request's time was over after {done} tokens"))
        with self._changed:
            if any(sequence.request.cancelled for _, _, sequence in self.waiting):
                self.waiting = [entry for entry in self.waiting if not entry[2].request.cancelled]
                heapq.heapify(self.waiting)
        for group in (self.prefilling, self.decoding):
            for sequence in [sequence for sequence in group if sequence.request.cancelled]:
                group.remove(sequence)
                self._release(sequence)

    def _admit(self) -> None:
        """Give free slots to the sequences that wait, in order; the first of a request prefills for its siblings."""
        with self._changed:
            later, free = [], self.table.free
            while self.waiting and self.table.free:
                entry = heapq.heappop(self.waiting)
                sequence = entry[2]
                if sequence.width > self.table.free:  # it is the next: the slots that come free are kept for it
                    later.append(entry)
                    break
                siblings = any(other.request is sequence.request for other in self.prefilling)
                if siblings or not self._ready(sequence):
                    later.append(entry)
                    continue
                self._place(sequence)
            for entry in later:
                heapq.heappush(self.waiting, entry)
            if self.reader is not None and self.table.free < free:
                self._changed.notify_all()  # the encoder may read on

    def _place(self, sequence: Running) -> None:
        request = sequence.request
        placement = self.table.place(request.prompt)
        if placement.source != placement.slot and placement.reused:
            self.executor.copy(placement.source, placement.slot, placement.reused)
        sequence.slots = [placement.slot, *(self.table.take() for _ in range(sequence.width - 1))]
        self.stats.reused_tokens += placement.reused
        self.stats.prompt_tokens += len(request.source or request.prompt)
        if self.reader is None:
            self.prefilling.append(sequence)
        else:
            self.reader.place(sequence)
            self.decoding.append(sequence)  # its prompt is one token: a step like any other

    def _release(self, sequence: Running) -> None:
        for slot in sequence.slots:
            self.table.release(slot)
        if self.reader is not None:
            self.reader.release(sequence)

    def _prefill(self) -> None:
        """Run pieces of prompts, first come first, up to the limit a step; who is done gets its first token."""
        budget = self.limits.prefill_tokens
        for sequence in list(self.prefilling):
            if budget <= 0:
                return
            prompt, held = sequence.request.prompt, self.table.tokens[sequence.slots[0]]
            piece = prompt[len(held) : len(held) + budget]
            budget -= len(piece)
            logits = self.executor.run(sequence.slots[0], np.array([piece], np.int64), np.array([len(held)], np.int64))
            held.extend(piece)
            if len(held) == len(prompt):
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
                self._accept([sequence], logits, [0])

    def _decode(self) -> None:
        """One token of every sequence and beam that is past its prompt."""
        if not self.decoding:
            return
        self._close_ranks()
        first, last = self.table.range()
        lengths = np.array([self.table.spare_position(slot) for slot in range(first, last)], np.int64)
        tokens = np.zeros((last - first, 1), np.int64)
        running = [(slot, t) for sequence in self.decoding for slot, t in zip(sequence.slots, sequence.inputs())]
        for slot, token in running:
            tokens[slot - first, 0] = token
        logits = self.executor.run(first, tokens, lengths)
        for slot, token in running:
            self.table.tokens[slot].append(token)
        self._accept(list(self.decoding), logits, [slot - first for slot, _ in running])

    def _close_ranks(self) -> None:
        """Move sequences into the holes that ended ones left, unless others wait for those."""
        if any(self._ready(entry[2]) for entry in self.waiting):
            return
        while True:
            hole = self.table.hole()
            if hole is None:
                return
            source, target = hole
            self.executor.copy(source, target, len(self.table.tokens[source]))
            self.table.move(source, target)
            for sequence in (*self.prefilling, *self.decoding):
                if source in sequence.slots:
                    sequence.slots[sequence.slots.index(source)] = target
                    if self.reader is not None:
                        self.reader.move(sequence, source)

    def _accept(self, sequences: "Sequence[Running]", logits: np.ndarray, rows: "list[int]") -> None:
        """Choose what each sequence says next, and pass it on. `rows`: of `logits`, in the order of the sequences."""
        singles = [sequence for sequence in sequences if isinstance(sequence, GeneratedSequence)]
        if len(singles) == len(sequences):
            self._say(singles, logits if rows == list(range(len(logits))) else logits[rows])
            return
        start, own = 0, []
        for sequence in sequences:
            count = len(sequence.inputs())
            if isinstance(sequence, Beams):
                self._search(sequence, [logits[row] for row in rows[start : start + count]])
            else:
                own.append(rows[start])
            start += count
        if singles:
            self._say(singles, logits[own])

    def _say(self, sequences: "list[GeneratedSequence]", logits: np.ndarray) -> None:
        """Choose a token for each row, and pass on what it says. What fails for one request fails for it alone."""
        samplers = [sequence.sampler for sequence in sequences]
        choices: "list[Choice | Exception]"
        try:
            choices = list(choose(logits, samplers))
        except Exception:
            choices = [_choose_alone(logits[row : row + 1], sampler) for row, sampler in enumerate(samplers)]
        now = time.monotonic()
        for sequence, choice in zip(sequences, choices):
            if isinstance(choice, Exception):
                self._give_up(sequence, choice)
                sequence.sampler.generated.append(0)
                continue
            self.stats.generated_tokens += 1
            self._count_first(sequence.request, now)
            piece = sequence.advance(choice, self.table.max_length)
            if piece is None:
                continue
            if piece.finish_reason:
                self._finish(sequence, [piece], now)
            elif not sequence.request.cancelled:
                sequence.request.emit(piece)

    def _search(self, beams: Beams, logits: "list[np.ndarray]") -> None:
        """Let a search choose its next beams, and bring their keys and values to where they go on."""
        now = time.monotonic()
        try:
            parents = beams.search.step(logits)
        except Exception as error:
            self._give_up(beams, error)
            return
        self._count_first(beams.request, now)
        if beams.search.done:
            pieces = beams.pieces()
            self.stats.generated_tokens += sum(piece.completion_tokens for piece in pieces)
            self._finish(beams, pieces, now)
            return
        beams.slots, copies = reorder(beams.slots, parents)
        for source, target in copies:
            held, other = self.table.tokens[source], self.table.tokens[target]
            start = common_length(held, other)  # beams share the keys and values of what they said alike
            self.executor.copy(source, target, len(held), start)
            self.table.tokens[target] = list(held)
            self.stats.moved_positions += len(held) - start

    def _count_first(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self.stats.first_token_seconds += now - request.arrived
            self.stats.first_tokens += 1

    def _finish(self, sequence: Running, pieces: "list[Piece]", now: float) -> None:
        """Free the slots of a sequence that ended, then pass on its last pieces."""
        self.decoding.remove(sequence)
        self._release(sequence)
        self.stats.token_seconds += now - (sequence.request.first_token or now)
        self.stats.later_tokens += sum(piece.completion_tokens for piece in pieces) - len(pieces)
        if not sequence.request.cancelled:
            for piece in pieces:
                sequence.request.emit(piece)

    def _give_up(self, sequence: Running, error: Exception) -> None:
        self._fail(sequence.request, error)
        sequence.request.cancelled = True  # its slots are free with the next step

    def _fail(self, request: Request, error: Exception) -> None:
        if not request.failed:
            request.failed = True
            self.stats.failures += 1
            request.fail(error)

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            left = [*(entry[2] for entry in self.waiting), *self.prefilling, *self.decoding]
            self.waiting, self.prefilling, self.decoding = [], [], []
        for sequence in left:
            if not sequence.request.cancelled:
                self._fail(sequence.request, error)


def _choose_alone(logits: np.ndarray, sampler: Sampler) -> "Choice | Exception":
    try:
        return choose(logits, [sampler])[0]
    except Exception as error:
        return error


def no_thread(engine: Engine) -> None:
    """For builds and tests: run the loop in the caller's thread until nothing is left."""
    while engine.waiting or engine.prefilling or engine.decoding:
        if engine.reader is not None:
            engine.encode()
        engine.step()

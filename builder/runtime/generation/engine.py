"""The decode loop: continuous batching over a fixed arena of slots.

Each step drops what was cancelled, admits what waits, runs a bounded piece of prefill and then one token of every
running sequence. A sequence that ends frees its slot in that step. Knows token ids, an executor and callbacks; knows
nothing about Triton, tensors of requests, or how a prompt was made.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .cache import SlotTable
from .executor import Executor
from .options import Options
from .sampling import Choice, Sampler, choose
from .text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """What one step gave one sequence. `finish_reason` is set on the last piece."""

    index: int
    text: str
    tokens: "tuple[Choice, ...]"
    finish_reason: str = ""
    completion_tokens: int = 0


@dataclass(eq=False)
class Request:
    """One request on its way: its prompt, and where its pieces, or its one error, go."""

    prompt: "list[int]"
    options: Options
    max_tokens: int
    emit: "Callable[[Piece], None]"
    fail: "Callable[[Exception], None]"
    deadline: "float | None" = None  # time.monotonic()
    arrived: float = field(default_factory=time.monotonic)
    first_token: "float | None" = None
    cancelled: bool = False
    failed: bool = False


@dataclass(eq=False)
class GeneratedSequence:
    """One of a request's n sequences."""

    request: Request
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopStrings
    end_ids: "frozenset[int]"
    slot: int = -1
    unsent: "list[Choice]" = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.sampler.stream


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
    prefill_tokens: int  # of prompts, between two decode steps


class Engine:
    """Owns the executor, the slots and the thread that steps them."""

    def __init__(self, executor: Executor, limits: Limits, reuse_prefixes: bool = True) -> None:
        geometry = executor.geometry
        self.executor = executor
        self.limits = limits
        self.table = SlotTable(geometry.slots, geometry.max_length, reuse_prefixes)
        self.waiting: "list[tuple[int, int, GeneratedSequence]]" = []  # a heap: priority, then arrival
        self.prefilling: "list[GeneratedSequence]" = []
        self.decoding: "list[GeneratedSequence]" = []
        self.stats = Stats(slots=geometry.slots)
        self.failure: "Exception | None" = None
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="decode loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step that runs; requests that are left get an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._fail_all(EngineFailed("the model was unloaded before this request was answered"))

    def submit(self, sequences: "Sequence[GeneratedSequence]") -> None:
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
            for sequence in sequences:
                entry = (sequence.request.options.priority, next(self._order), sequence)
                heapq.heappush(self.waiting, entry)
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self.waiting or self.prefilling or self.decoding or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
            try:
                self.step()
            except Exception as error:
                with self._changed:
                    self.failure, self.stats.healthy = error, 0
                self._fail_all(EngineFailed(f"the decode loop failed: {error!r}"))
                return

    def step(self) -> None:
        """One turn of the loop."""
        self._drop()
        self._admit()
        self._prefill()
        self._decode()
        self.stats.steps += 1
        self.stats.running = len(self.prefilling) + len(self.decoding)
        self.stats.waiting = len(self.waiting)

    def _drop(self) -> None:
        """Forget cancelled requests, and refuse those whose time is over."""
        now = time.monotonic()
        with self._changed:
            queued = [sequence for _, _, sequence in self.waiting]
        for sequence in [*queued, *self.prefilling, *self.decoding]:
            request = sequence.request
            if request.deadline is not None and now > request.deadline and not request.cancelled:
                request.cancelled = True
                done = len(sequence.sampler.generated)
                self._fail(request, DeadlineExceeded(f"the request's time was over after {done} tokens"))
        with self._changed:
            if any(sequence.request.cancelled for _, _, sequence in self.waiting):
                self.waiting = [entry for entry in self.waiting if not entry[2].request.cancelled]
                heapq.heapify(self.waiting)
        for group in (self.prefilling, self.decoding):
            for sequence in [sequence for sequence in group if sequence.request.cancelled]:
                group.remove(sequence)
                self.table.release(sequence.slot)

    def _admit(self) -> None:
        """Give free slots to the sequences that wait, in order; the first of a request prefills for its siblings."""
        with self._changed:
            later = []
            while self.waiting and self.table.free:
                entry = heapq.heappop(self.waiting)
                sequence = entry[2]
                if any(other.request is sequence.request for other in self.prefilling):
                    later.append(entry)
                    continue
                self._place(sequence)
            for entry in later:
                heapq.heappush(self.waiting, entry)

    def _place(self, sequence: GeneratedSequence) -> None:
        prompt = sequence.request.prompt
        placement = self.table.place(prompt)
        if placement.source != placement.slot and placement.reused:
            self.executor.copy(placement.source, placement.slot, placement.reused)
        sequence.slot = placement.slot
        self.stats.reused_tokens += placement.reused
        self.stats.prompt_tokens += len(prompt)
        self.prefilling.append(sequence)

    def _prefill(self) -> None:
        """Run pieces of prompts, first come first, up to the limit a step; who is done gets its first token."""
        budget = self.limits.prefill_tokens
        for sequence in list(self.prefilling):
            if budget <= 0:
                return
            prompt, held = sequence.request.prompt, self.table.tokens[sequence.slot]
            piece = prompt[len(held) : len(held) + budget]
            budget -= len(piece)
            logits = self.executor.run(sequence.slot, np.array([piece], np.int64), np.array([len(held)], np.int64))
            held.extend(piece)
            if len(held) == len(prompt):
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)
                self._accept([sequence], logits)

    def _decode(self) -> None:
        """One token of every sequence that is past its prompt."""
        if not self.decoding:
            return
        self._close_ranks()
        first, last = self.table.range()
        lengths = np.array([self.table.spare_position(slot) for slot in range(first, last)], np.int64)
        tokens = np.zeros((last - first, 1), np.int64)
        for sequence in self.decoding:
            tokens[sequence.slot - first, 0] = sequence.sampler.generated[-1]
        logits = self.executor.run(first, tokens, lengths)
        for sequence in self.decoding:
            self.table.tokens[sequence.slot].append(sequence.sampler.generated[-1])
        rows = [sequence.slot - first for sequence in self.decoding]
        self._accept(list(self.decoding), logits if rows == list(range(len(logits))) else logits[rows])

    def _close_ranks(self) -> None:
        """Move sequences into the holes that ended ones left, unless others wait for those."""
        if self.waiting:
            return
        while True:
            hole = self.table.hole()
            if hole is None:
                return
            source, target = hole
            self.executor.copy(source, target, len(self.table.tokens[source]))
            self.table.move(source, target)
            for sequence in (*self.prefilling, *self.decoding):
                if sequence.slot == source:
                    sequence.slot = target

    def _accept(self, sequences: "list[GeneratedSequence]", logits: np.ndarray) -> None:
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
                self._fail(sequence.request, choice)
                sequence.request.cancelled = True  # its slot is free with the next step
                sequence.sampler.generated.append(0)
                continue
            self.stats.generated_tokens += 1
            request = sequence.request
            if request.first_token is None:
                request.first_token = now
                self.stats.first_token_seconds += now - request.arrived
                self.stats.first_tokens += 1
            piece = advance(sequence, choice, self.table.max_length)
            if piece is None:
                continue
            if piece.finish_reason:
                self.decoding.remove(sequence)
                self.table.release(sequence.slot)
                self.stats.token_seconds += now - request.first_token
                self.stats.later_tokens += len(sequence.sampler.generated) - 1
            if not request.cancelled:
                request.emit(piece)

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


def advance(sequence: GeneratedSequence, choice: Choice, max_length: int) -> "Piece | None":
    """Append a token to a sequence: the piece to pass on; None where it only began a character or a stop string."""
    sampler, options = sequence.sampler, sequence.request.options
    sampler.generated.append(choice.token)
    count = len(sampler.generated)
    sequence.unsent.append(choice)
    reason = ""
    if choice.token in sequence.end_ids and count > options.min_tokens:
        reason, text = "stop", sequence.detokenizer.flush()
    else:
        text = sequence.detokenizer.push(choice.token)
        if count >= sequence.request.max_tokens or len(sequence.request.prompt) + count >= max_length:
            reason = "length"
            text += sequence.detokenizer.flush()
    if count > options.min_tokens:
        text = sequence.stops.push(text)
        if sequence.stops.found:
            reason = "stop"
        elif reason:
            text += sequence.stops.flush()
    if not text and not reason:
        return None
    tokens, sequence.unsent = tuple(sequence.unsent), []
    return Piece(sequence.index, text, tokens, reason, count)


def no_thread(engine: Engine) -> None:
    """For builds and tests: run the loop in the caller's thread until nothing is left."""
    while engine.waiting or engine.prefilling or engine.decoding:
        engine.step()

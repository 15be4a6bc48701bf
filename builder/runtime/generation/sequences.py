"""Sequences that the decode loop runs: one that generates a token a step, or one search's beams. Both end as text.

Knows token ids, detokenisers and stops; knows nothing about slots' contents, executors or Triton.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Union

import numpy as np

from .beams import BeamSearch
from .lookup import Lookup
from .options import Options
from .pace import Pace
from .sampling import Choice, Sampler, choice
from .text import Detokenizer, StopStrings


class RequestStatus(enum.Enum):
    """State of a request: whether its client still waits for the answers."""

    ACTIVE = "active"
    CANCELLED = "cancelled"  # its client disconnected
    FAILED = "failed"  # its client got an error


class SequenceStatus(enum.Enum):
    """Stage of a sequence; a preempted one waits again."""

    WAITING = "waiting"  # in the queue, without a slot
    PREFILLING = "prefilling"  # its prompt is read in pieces
    DECODING = "decoding"  # a token a step
    FINISHED = "finished"


Later = Callable[[Callable[[], None]], None]  # runs its arguments one after the other, in any thread


def at_once(work: "Callable[[], None]") -> None:
    """Run `work` in the calling thread."""
    work()


@dataclass(frozen=True)
class Piece:
    """Result of one step for one sequence: `finish_reason` is set on the last piece, `score` with beam search."""

    index: int
    text: str
    tokens: "tuple[Choice, ...]"
    finish_reason: str = ""
    completion_tokens: int = 0
    score: "float | None" = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0


@dataclass(eq=False)
class Request:
    """Request in progress: its prompt, and where its pieces, or its one error, go.

    `source` is what the encoder of an encoder-decoder model reads; `prompt` is then the one token that the decoder
    starts from. `encoded`: the source's keys and values, once computed. `later` runs the delivery of its pieces, at
    once or in another thread; after a piece that could not be delivered (`broken`), no more are.
    """

    prompt: "list[int]"
    options: Options
    max_tokens: int
    emit: "Callable[[Piece], None]"
    fail: "Callable[[Exception], None]"
    deadline: "float | None" = None  # time.monotonic()
    source: "tuple[int, ...]" = ()
    arrived: float = field(default_factory=time.monotonic)
    first_token: "float | None" = None
    cached_tokens: int = 0  # tokens of its prompt that were in the cache when its first sequence got a slot
    queue_seconds: "float | None" = None  # time until then
    encoding: bool = False  # True once the encoder reads its source, or has read it
    encoded: Any = None
    unplaced: int = 0  # how many of its sequences wait
    scores: "list[Choice] | None" = None  # of the prompt's tokens after the first, as far as known, if requested
    status: RequestStatus = RequestStatus.ACTIVE
    later: Later = at_once
    broken: bool = False
    ending: threading.Lock = field(default_factory=threading.Lock)  # guards `status`: several threads may end a request

    @property
    def active(self) -> bool:
        """True if the client still waits for the answer."""
        return self.status is RequestStatus.ACTIVE

    @property
    def scored(self) -> bool:
        """True if log-probabilities of its prompt are still to come."""
        return self.scores is not None and len(self.scores) < len(self.prompt) - 1

    @property
    def reusable(self) -> int:
        """Number of prompt tokens that need not run if their keys and values are cached."""
        return len(self.prompt) - 1 if self.scores is None else len(self.scores)  # these have given their logits

    def score(self, start: int, logits: np.ndarray) -> None:
        """Record log-probabilities: `logits`, (positions, vocabulary), follow the prompt's tokens from `start` on."""
        assert self.scores is not None
        known = len(self.scores)
        for row, token in zip(logits[known - start :], self.prompt[known + 1 :]):
            self.scores.append(choice(row, token, self.options.prompt_logprobs))

    def cancel(self) -> bool:
        """Cancel the request: its slots become free with the next step. Returns False if it had ended."""
        return self._ends_as(RequestStatus.CANCELLED)

    def refuse(self, error: Exception) -> bool:
        """Send the client `error`; return False if the request has ended, for it gets one error at most."""
        if not self._ends_as(RequestStatus.FAILED):
            return False
        self.fail(error)
        return True

    def _ends_as(self, status: RequestStatus) -> bool:
        with self.ending:
            was, self.status = self.active, status if self.active else self.status
        return was


@dataclass(eq=False)
class GeneratedSequence:
    """One of a request's n sequences."""

    request: Request
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopStrings
    end_ids: "frozenset[int]"
    slots: "list[int]" = field(default_factory=list)
    source: int = -1  # place in the arena of the text that it attends to
    status: SequenceStatus = SequenceStatus.WAITING
    turn: int = 0  # in the order of arrival
    restarted: bool = False
    unsent: "list[Choice]" = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)  # of a draft model

    width = 1

    @property
    def index(self) -> int:
        return self.sampler.stream

    def restart(self) -> None:
        """Start again from the same tokens, whose keys and values were evicted."""
        self.slots, self.restarted = [], True

    @property
    def generated(self) -> int:
        return len(self.sampler.generated)

    @property
    def tokens(self) -> "list[int]":
        """Tokens that must have run before the next new token."""
        return [*self.request.prompt, *self.sampler.generated]

    def inputs(self) -> "list[int]":
        """Return the token that the next step runs."""
        return [(self.sampler.generated or self.request.prompt)[-1]]

    def room(self, max_length: int) -> int:
        """Return how many tokens may be guessed after its `inputs`, within its limits; 0 with a guide."""
        request = self.request
        left = min(request.max_tokens, max_length - len(request.prompt)) - self.generated - 1
        return 0 if self.sampler.guide is not None else max(0, left)

    @cached_property
    def lookup(self) -> Lookup:
        """Lookup of repeated text, as far as `looked_up` was called."""
        return Lookup(self.request.prompt)

    def looked_up(self, most: int) -> "list[int]":
        """Return up to `most` tokens that may come after its `inputs`, because they did before."""
        self.lookup.extend(self.sampler.generated[len(self.lookup.tokens) - len(self.request.prompt) :])
        return self.lookup.guess(most)

    def advance(self, choice: Choice, max_length: int) -> "Piece | None":
        """Append a token; return the piece to pass on, or None if it only began a character or a stop string.

        Raises InputError if its guide cannot go on.
        """
        sampler, options = self.sampler, self.request.options
        whole = sampler.push(choice.token)
        count = len(sampler.generated)
        self.unsent.append(choice)
        reason = ""
        if choice.token in self.end_ids and count > options.min_tokens:
            reason, text = "stop", self.detokenizer.flush()
        else:
            text = self.detokenizer.push(choice.token)
            if whole:
                reason = "stop"
                text += self.detokenizer.flush()
            elif count >= self.request.max_tokens or len(self.request.prompt) + count >= max_length:
                reason = "length"
                text += self.detokenizer.flush()
        if count > options.min_tokens:
            text = self.stops.push(text)
            if self.stops.matched:
                reason = "stop"
            elif reason:
                text += self.stops.flush()
        if not text and not reason:
            return None
        tokens, self.unsent = tuple(self.unsent), []
        if not reason:
            return Piece(self.index, text, tokens)
        waited = self.request.queue_seconds or 0.0
        return Piece(self.index, text, tokens, reason, count, None, self.request.cached_tokens, waited)


@dataclass(eq=False)
class Beams:
    """Beams of one request; they give no text until the search ends, and then its n best hypotheses."""

    request: Request
    search: BeamSearch
    detokenizer: "Callable[[], Detokenizer]"
    slots: "list[int]" = field(default_factory=list)  # those of running beams first
    source: int = -1  # place in the arena of the text that it attends to
    status: SequenceStatus = SequenceStatus.WAITING
    turn: int = 0  # in the order of arrival
    restarted: bool = False

    @property
    def width(self) -> int:
        return self.search.width

    def restart(self) -> None:
        """Start the search again, with the same result; its keys and values were evicted."""
        self.search = BeamSearch(self.search.rules, self.request.prompt, self.search.end_ids)
        self.slots, self.restarted = [], True

    @property
    def generated(self) -> int:
        return len(self.search.generated[0])

    @property
    def tokens(self) -> "list[int]":
        """Tokens that run before its beams diverge."""
        return self.request.prompt

    def inputs(self) -> "list[int]":
        """Return the token of each running beam that the next step runs."""
        return [(generated or self.request.prompt)[-1] for generated in self.search.generated]

    def pieces(self) -> "list[Piece]":
        """Return the n best hypotheses, best first."""
        pieces = []
        for index, hypothesis in enumerate(self.search.ended[: self.request.options.n]):
            detokenizer = self.detokenizer()
            generated: "Sequence[int]" = hypothesis.tokens[: -1 if hypothesis.finish_reason == "stop" else None]
            text = "".join(map(detokenizer.push, generated)) + detokenizer.flush()
            count = len(hypothesis.tokens)
            cached, waited = self.request.cached_tokens, self.request.queue_seconds or 0.0
            pieces.append(Piece(index, text, (), hypothesis.finish_reason, count, hypothesis.score, cached, waited))
        return pieces


Running = Union[GeneratedSequence, Beams]

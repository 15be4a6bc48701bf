"""What the decode loop runs: a sequence that says a token a step, or the beams of one search. Both end as text.

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
    """Whether anybody still waits for the answers of a request."""

    ACTIVE = "active"
    CANCELLED = "cancelled"  # its client is gone
    FAILED = "failed"  # its client has been told why


class SequenceStatus(enum.Enum):
    """Where a sequence is; one that is preempted waits again."""

    WAITING = "waiting"  # in the queue, without a slot
    PREFILLING = "prefilling"  # its prompt is read in pieces
    DECODING = "decoding"  # a token a step
    FINISHED = "finished"


Later = Callable[[Callable[[], None]], None]  # does one after the other what it is given, in any thread


def at_once(work: "Callable[[], None]") -> None:
    """Do `work` in the thread that has it."""
    work()


@dataclass(frozen=True)
class Piece:
    """What one step gave one sequence. `finish_reason` is set on the last piece, `score` on one of a beam search."""

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
    """One request on its way: its prompt, and where its pieces, or its one error, go.

    `source` is what the encoder of an encoder-decoder model reads; `prompt` is then the one token a decoder starts
    with. `encoded` are its keys and values, once there. `later`: has its pieces passed on, at once or by another
    thread; after one that could not be, `broken`, none is.
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
    cached_tokens: int = 0  # of its prompt, whose keys and values were there when its first sequence got a slot
    queue_seconds: "float | None" = None  # until then
    encoding: bool = False  # the encoder reads its source, or has read it
    encoded: Any = None
    unplaced: int = 0  # of its sequences, those that wait
    scores: "list[Choice] | None" = None  # of the prompt's tokens after the first, as far as known, where asked for
    status: RequestStatus = RequestStatus.ACTIVE
    later: Later = at_once
    broken: bool = False
    ending: threading.Lock = field(default_factory=threading.Lock)  # of `status`: several threads may end a request

    @property
    def active(self) -> bool:
        """Whether somebody waits for its answer."""
        return self.status is RequestStatus.ACTIVE

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return self.scores is not None and len(self.scores) < len(self.prompt) - 1

    @property
    def reusable(self) -> int:
        """How many of its prompt's tokens need not run where their keys and values are there already."""
        return len(self.prompt) - 1 if self.scores is None else len(self.scores)  # so many have given their logits

    def score(self, start: int, logits: np.ndarray) -> None:
        """Note log-probabilities: `logits`, (positions, vocabulary), come after the prompt's tokens from `start` on."""
        assert self.scores is not None
        known = len(self.scores)
        for row, token in zip(logits[known - start :], self.prompt[known + 1 :]):
            self.scores.append(choice(row, token, self.options.prompt_logprobs))

    def cancel(self) -> bool:
        """Nobody waits for its answer any more: its slots are free with the next step. False where it was over."""
        return self._ends_as(RequestStatus.CANCELLED)

    def refuse(self, error: Exception) -> bool:
        """Tell the client `error`; False where the request is over already, for it has one error at most."""
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
    source: int = -1  # the place in the arena of what it attends to
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
        """Its keys and values are gone: they are computed again, from the same tokens."""
        self.slots, self.restarted = [], True

    @property
    def generated(self) -> int:
        return len(self.sampler.generated)

    @property
    def tokens(self) -> "list[int]":
        """All that the next call needs to have been run before it gives a new token."""
        return [*self.request.prompt, *self.sampler.generated]

    def inputs(self) -> "list[int]":
        """The token that the next step runs."""
        return [(self.sampler.generated or self.request.prompt)[-1]]

    def room(self, max_length: int) -> int:
        """How many tokens may be guessed after its `inputs`: no more than it may say; none of a guided one."""
        request = self.request
        left = min(request.max_tokens, max_length - len(request.prompt)) - self.generated - 1
        return 0 if self.sampler.guide is not None else max(0, left)

    @cached_property
    def lookup(self) -> Lookup:
        """What its text repeats, as far as `looked_up` was asked."""
        return Lookup(self.request.prompt)

    def looked_up(self, most: int) -> "list[int]":
        """Up to `most` tokens that may come after its `inputs`, for they did before."""
        self.lookup.extend(self.sampler.generated[len(self.lookup.tokens) - len(self.request.prompt) :])
        return self.lookup.guess(most)

    def advance(self, choice: Choice, max_length: int) -> "Piece | None":
        """Append a token: the piece to pass on; None where it only began a character or a stop string.

        Raises InputError where its guide cannot go on.
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
    """The beams of one request; they say nothing until the search is over, and then its n best hypotheses."""

    request: Request
    search: BeamSearch
    detokenizer: "Callable[[], Detokenizer]"
    slots: "list[int]" = field(default_factory=list)  # those of running beams first
    source: int = -1  # the place in the arena of what it attends to
    status: SequenceStatus = SequenceStatus.WAITING
    turn: int = 0  # in the order of arrival
    restarted: bool = False

    @property
    def width(self) -> int:
        return self.search.width

    def restart(self) -> None:
        """Its keys and values are gone: the search begins again, and finds the same."""
        self.search = BeamSearch(self.search.rules, self.request.prompt, self.search.end_ids)
        self.slots, self.restarted = [], True

    @property
    def generated(self) -> int:
        return len(self.search.generated[0])

    @property
    def tokens(self) -> "list[int]":
        """What runs before its beams part."""
        return self.request.prompt

    def inputs(self) -> "list[int]":
        """The token of each running beam that the next step runs."""
        return [(generated or self.request.prompt)[-1] for generated in self.search.generated]

    def pieces(self) -> "list[Piece]":
        """The n best hypotheses, best first."""
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

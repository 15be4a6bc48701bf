"""Hold the state of a request and of its sequences: each generates a token a step, or is one search with its beams.

Knows token ids, detokenisers and stop strings; knows nothing about slots' contents, executors or Triton.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Union

import numpy as np

from ..lora import Adapter
from .beams import BeamSearch
from .options import RequestOptions
from .sampling import Sampler, TokenChoice, scored_choice
from .speculation import DraftLength, PromptLookup
from .text import Detokenizer, StopStrings


class RequestStatus(enum.Enum):
    """State of a request."""

    ACTIVE = "active"
    CANCELLED = "cancelled"  # by its client
    FAILED = "failed"  # its client got an error


class SequenceStatus(enum.Enum):
    """Stage of a sequence; a preempted one waits again."""

    WAITING = "waiting"  # in the queue, without a slot
    PREFILLING = "prefilling"  # its prompt runs in chunks
    DECODING = "decoding"  # a token a step
    FINISHED = "finished"


Defer = Callable[[Callable[[], None]], None]  # runs its arguments one after the other, in any thread


def run_now(work: "Callable[[], None]") -> None:
    """Run `work` in the calling thread."""
    work()


@dataclass(frozen=True)
class AnswerPiece:
    """Result of one step for one sequence: `finish_reason` is set on the last piece, `score` with beam search."""

    index: int
    text: str
    tokens: "tuple[TokenChoice, ...]"
    finish_reason: str = ""
    completion_tokens: int = 0
    score: "float | None" = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0


def join_pieces(pieces: "Sequence[AnswerPiece]") -> "list[AnswerPiece]":
    """Return one piece for each sequence that has some, which ends as the last of them."""
    by_index: "dict[int, list[AnswerPiece]]" = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [
        replace(parts[-1], text="".join(part.text for part in parts), tokens=sum((part.tokens for part in parts), ()))
        for parts in by_index.values()
    ]


@dataclass(eq=False)
class Request:
    """Request in progress: its prompt, and the callbacks for its pieces (`emit`) and its only error (`fail`).

    `adapter`: its LoRA adapter; None: the model as it is. `source`: tokens that an encoder reads; `prompt` is then the
    one token that the decoder starts from. `encoded`: the keys and values of the source. `defer` runs the delivery of
    pieces, now or in another thread; after a piece that could not be delivered (`undeliverable`), no further ones are.
    """

    prompt: "list[int]"
    options: RequestOptions
    max_tokens: int
    emit: "Callable[[AnswerPiece], None]"
    fail: "Callable[[Exception], None]"
    deadline: "float | None" = None  # time.monotonic()
    source: "tuple[int, ...]" = ()
    adapter: "Adapter | None" = None
    arrived: float = field(default_factory=time.monotonic)
    first_token: "float | None" = None
    cached_tokens: int = 0  # tokens of its prompt that were in the cache when its first sequence got a slot
    queue_seconds: "float | None" = None  # time until its first sequence got a slot
    encoding: bool = False  # True while or after the encoder runs its source
    encoded: Any = None
    waiting_sequences: int = 0
    scores: "list[TokenChoice] | None" = None  # of the prompt's tokens after the first, so far, if requested
    status: RequestStatus = RequestStatus.ACTIVE
    defer: Defer = run_now
    undeliverable: bool = False
    status_lock: threading.Lock = field(default_factory=threading.Lock)

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
        """Number of prompt tokens that need not run if they are cached."""
        return len(self.prompt) - 1 if self.scores is None else len(self.scores)

    @property
    def cache_key(self) -> str:
        """Identity of the weights that compute its keys and values: those of other weights are not reused."""
        return "" if self.adapter is None else self.adapter.digest

    def score(self, start: int, logits: np.ndarray) -> None:
        """Record log-probabilities: `logits`, (positions, vocabulary), follow the prompt's tokens from `start` on."""
        assert self.scores is not None
        known = len(self.scores)
        for row, token in zip(logits[known - start :], self.prompt[known + 1 :]):
            self.scores.append(scored_choice(row, token, self.options.prompt_logprobs))

    def cancel(self) -> bool:
        """Cancel the request; its slots become free with the next step. Return False if it had ended."""
        return self._end_as(RequestStatus.CANCELLED)

    def refuse(self, error: Exception) -> bool:
        """Send the client `error`; return False if the request had ended."""
        if not self._end_as(RequestStatus.FAILED):
            return False
        self.fail(error)
        return True

    def _end_as(self, status: RequestStatus) -> bool:
        with self.status_lock:
            was_active, self.status = self.active, status if self.active else self.status
        return was_active


@dataclass(eq=False)
class ScheduledSequence:
    """State that the scheduler sets."""

    request: Request
    slots: "list[int]" = field(default_factory=list, init=False)  # of running beams first
    source: int = field(default=-1, init=False)  # its place in the encoder cache
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    arrival: int = field(default=0, init=False)  # in the order of arrival
    was_preempted: bool = field(default=False, init=False)

    def restart(self) -> None:
        """Wait again after preemption; its tokens will be recomputed."""
        self.slots, self.was_preempted = [], True


@dataclass(eq=False)
class GeneratedSequence(ScheduledSequence):
    """One of a request's n sequences."""

    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopStrings
    end_ids: "frozenset[int]"
    unsent: "list[TokenChoice]" = field(default_factory=list)
    draft_length: DraftLength = field(default_factory=DraftLength)

    width = 1

    @property
    def index(self) -> int:
        return self.sampler.stream

    @property
    def generated(self) -> int:
        return len(self.sampler.generated)

    @property
    def tokens(self) -> "list[int]":
        """Tokens to cache before the next one is chosen."""
        return [*self.request.prompt, *self.sampler.generated]

    def inputs(self) -> "list[int]":
        """Return the token that the next step runs."""
        return [(self.sampler.generated or self.request.prompt)[-1]]

    def max_speculative(self, max_length: int) -> int:
        """Return how many speculative tokens may follow its `inputs`; 0 with a guide."""
        request = self.request
        remaining = min(request.max_tokens, max_length - len(request.prompt)) - self.generated - 1
        return 0 if self.sampler.guide is not None else max(0, remaining)

    @cached_property
    def lookup(self) -> PromptLookup:
        """Prompt lookup over the tokens that `propose_by_lookup` has seen."""
        return PromptLookup(self.request.prompt)

    def propose_by_lookup(self, limit: int, least: float) -> "list[int]":
        """Return up to `limit` tokens that may come after its `inputs`, each at least as probable as `least`."""
        self.lookup.extend(self.sampler.generated[len(self.lookup.tokens) - len(self.request.prompt) :])
        return self.lookup.propose(limit, least)

    def advance(self, choice: TokenChoice, max_length: int) -> "AnswerPiece | None":
        """Append a token; return the piece to emit, or None if it only began a character or a stop string.

        Raises InputError if its guide cannot continue.
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
            return AnswerPiece(self.index, text, tokens)
        waited = self.request.queue_seconds or 0.0
        return AnswerPiece(self.index, text, tokens, reason, count, None, self.request.cached_tokens, waited)


@dataclass(eq=False)
class BeamSequence(ScheduledSequence):
    """Beams of one request; they give no text until the search ends, and then its n best hypotheses."""

    search: BeamSearch
    detokenizer: "Callable[[], Detokenizer]"

    @property
    def width(self) -> int:
        return self.search.width

    def restart(self) -> None:
        """Wait again after preemption; the search starts over, with the same result."""
        super().restart()
        self.search = BeamSearch(self.search.rules, self.request.prompt, self.search.end_ids)

    @property
    def generated(self) -> int:
        return len(self.search.generated[0])

    @property
    def tokens(self) -> "list[int]":
        """Tokens to cache before its beams diverge."""
        return self.request.prompt

    def inputs(self) -> "list[int]":
        """Return the token of each running beam that the next step runs."""
        return [(generated or self.request.prompt)[-1] for generated in self.search.generated]

    def pieces(self) -> "list[AnswerPiece]":
        """Return the n best hypotheses, best first."""
        pieces = []
        for index, hypothesis in enumerate(self.search.ended[: self.request.options.n]):
            detokenizer = self.detokenizer()
            generated: "Sequence[int]" = hypothesis.tokens[: -1 if hypothesis.finish_reason == "stop" else None]
            text = "".join(map(detokenizer.push, generated)) + detokenizer.flush()
            count = len(hypothesis.tokens)
            cached, waited = self.request.cached_tokens, self.request.queue_seconds or 0.0
            pieces.append(
                AnswerPiece(index, text, (), hypothesis.finish_reason, count, hypothesis.score, cached, waited)
            )
        return pieces


RunningSequence = Union[GeneratedSequence, BeamSequence]

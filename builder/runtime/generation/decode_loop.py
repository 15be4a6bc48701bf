"""Run the decode loop: continuous batching over a fixed set of slots.

A step schedules calls, runs them on the executor, chooses the next tokens and emits their text. A second thread encodes
the sources of an encoder-decoder ahead of their turn. Knows token ids and an executor; knows nothing about Triton,
tensors of requests, or prompts as text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Union

import numpy as np

from .beams import reorder
from .calls import Call, Proposal
from .executors.base import MAX_CANDIDATES, CallPart, Executor, ScoredCandidates, TokenCandidates
from .sampling import Sampler, TokenChoice, choose
from .scheduler import Scheduler, SchedulerLimits
from .sequences import (
    AnswerPiece,
    BeamSequence,
    GeneratedSequence,
    Request,
    RequestStatus,
    RunningSequence,
    SequenceStatus,
    join_pieces,
)
from .slot_cache import SlotCache
from .speculation import Drafter, HiddenStatesDrafter
from .stats import Stats

IDLE_POLL_S = 0.05  # how often queue deadlines are checked while nothing runs
COUNT_MULTIPLE = 16  # a search's number of candidates is rounded up to a multiple, so that bindings are reused
LOG = logging.getLogger(__name__)
Logits = Union[np.ndarray, TokenCandidates]  # an array has all logits of a call


class DecodeLoopFailed(RuntimeError):
    """A step failed, so no running or waiting request can be answered."""


class DecodeLoop:
    """Owner of the executor, the scheduler and the thread that steps them."""

    def __init__(
        self, executor: Executor, limits: SchedulerLimits, reuse_prefixes: bool = True, draft: Executor | None = None
    ) -> None:
        """Create the decode loop; `draft` runs a smaller model, or a layer, that proposes tokens."""
        geometry = executor.geometry
        drafter: Drafter | None = None
        if draft is not None and draft.reads_hidden_states:
            drafter = HiddenStatesDrafter(draft, executor)
        elif draft is not None:
            drafter = Drafter(draft, geometry.vocabulary)
        self.executor = executor
        self.stats = Stats(slots=geometry.slots)
        self.encoder_cache = executor.encoder_cache(limits.prefill_tokens)
        reuse = reuse_prefixes and self.encoder_cache is None
        self.cache = SlotCache(
            geometry.slots, geometry.max_length, executor.copy, reuse, executor.blocks, executor.has_states
        )
        able = executor.can_speculate, executor.joins_prefills, executor.tile_tokens
        self.scheduler = Scheduler(self.cache, limits, self.stats, self.encoder_cache, *able, drafter, executor.lora)
        self.failure: BaseException | None = None
        self._pieces: dict[Request, list[AnswerPiece]] = {}  # of the calls that ran last
        self._stopping = False
        self._threads = [threading.Thread(target=self._loop, name="decode loop", daemon=True)]
        if self.encoder_cache is not None:
            self._threads.append(threading.Thread(target=self._encode_loop, name="encoder", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the loop after the step that runs; the remaining requests get an error."""
        with self.scheduler.changed:
            self._stopping = True
            self.scheduler.changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.scheduler.refuse_all(DecodeLoopFailed("the model was unloaded before this request was answered"))

    def submit(self, sequences: Sequence[RunningSequence]) -> None:
        """Queue the sequences of one request. Raises QueueFull, or DecodeLoopFailed if the loop has failed."""
        with self.scheduler.changed:
            if self.failure is not None:
                raise DecodeLoopFailed(f"the decode loop failed earlier: {self.failure!r}; reload the model")
            self.scheduler.submit(sequences)

    def step(self) -> None:
        """Schedule calls, run them and accept their logits."""
        for calls in self.scheduler.schedule():
            results = self._run(calls)
            for call in calls:
                self.cache.record(call.first, call.positions, call.written)
            for call, logits in zip(calls, results):
                if call.scored is not None:
                    assert isinstance(logits, np.ndarray)
                    self._score(call.scored, int(call.positions[0]), logits)
                if call.proposal is not None:
                    self._verify(call, call.proposal, logits)
                else:
                    self._accept(call, logits[-1:] if call.scored is not None else logits)
            self._deliver()
        self.stats.steps += 1

    def _run(self, calls: Sequence[Call]) -> Sequence[Logits]:
        """Return the logits of each call; several calls run as one."""
        parts = [CallPart(call.first, call.tokens, call.positions, call.logits_positions) for call in calls]
        if all(map(self._needs_candidates_only, calls)):
            return self.executor.best(parts)
        if len(parts) > 1:
            return self.executor.run_together(parts)
        if count := self._search_candidates(calls[0]):
            return [self.executor.likeliest(parts[0], count)]
        return [self.executor.run(*parts[0])]

    def _needs_candidates_only(self, call: Call) -> bool:
        """Return True if the executor's candidates are enough to choose the tokens of a call."""
        count, tokens = self.executor.candidates, 1 + (0 if call.proposal is None else len(call.proposal.tokens))
        if not count or call.scored is not None:
            return False
        return all(
            isinstance(sequence, GeneratedSequence) and sequence.sampler.needs_only_top(count, tokens)
            for sequence in call.sequences
        )

    def _search_candidates(self, call: Call) -> int:
        """Return how many candidates are enough for a call with beam searches; 0 if it needs all logits."""
        searches = [sequence.search for sequence in call.sequences if isinstance(sequence, BeamSequence)]
        others = [sequence.sampler for sequence in call.sequences if isinstance(sequence, GeneratedSequence)]
        if not (searches and self.executor.has_likeliest) or call.scored is not None:
            return 0
        try:
            needed = [search.candidates_needed() for search in searches]
        except Exception as error:  # over all scores the search fails again, and then its request alone
            LOG.warning("the number of candidates of a search is unknown, it gets all logits: %r", error)
            return 0
        count = -(-max(needed) // COUNT_MULTIPLE) * COUNT_MULTIPLE
        is_enough = all(needed) and all(sampler.needs_only_top(count, 1) for sampler in others)
        return count if is_enough and count <= MAX_CANDIDATES else 0

    def encode(self) -> None:
        """Run the encoder once, over the next source and others of similar length."""
        assert self.encoder_cache is not None
        with self.scheduler.changed:
            batch = self.encoder_cache.next_batch(self.scheduler.unencoded())
        if not batch:
            return
        encoded = self.encoder_cache.executor.encode([request.source for request in batch])
        with self.scheduler.changed:
            for request, result in zip(batch, encoded):
                request.encoded = result
            self.stats.encoder_calls += 1
            self.stats.encoded_tokens += sum(len(request.source) for request in batch)
            self.scheduler.changed.notify_all()

    def run_until_idle(self) -> None:
        """Run the loop in the caller's thread until all requests have ended, for builds and tests."""
        while self.scheduler.has_unfinished:
            if self.encoder_cache is not None:
                self.encode()
            self.step()

    def _loop(self) -> None:
        scheduler = self.scheduler
        while True:
            with scheduler.changed:
                while not (scheduler.running or scheduler.has_startable() or self._stopping):
                    scheduler.changed.wait(IDLE_POLL_S if scheduler.waiting else None)
                if self._stopping:
                    return
            if not self._guarded(self.step):
                return

    def _encode_loop(self) -> None:
        while True:
            with self.scheduler.changed:
                while not (self.scheduler.unencoded() or self._stopping or self.failure):
                    self.scheduler.changed.wait()
                if self._stopping or self.failure:
                    return
            if not self._guarded(self.encode):
                return

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Run `work`; if it raises, fail all requests and return False."""
        try:
            work()
        except BaseException as error:  # the thread ends, so no request may be left waiting, whatever the error
            with self.scheduler.changed:
                self.failure, self.stats.healthy = error, 0
                self.scheduler.changed.notify_all()
            self.scheduler.refuse_all(DecodeLoopFailed(f"the decode loop failed: {error!r}"))
            return False
        return True

    def _score(self, request: Request, start: int, logits: np.ndarray) -> None:
        """Record log-probabilities of a prompt; an error fails that request alone."""
        try:
            request.score(start, logits)
        except Exception as error:
            self.scheduler.refuse(request, error)

    def _verify(self, call: Call, proposal: Proposal, logits: Logits) -> None:
        """Choose tokens one by one, for as long as each equals the speculative token."""
        (sequence,) = call.sequences
        assert isinstance(sequence, GeneratedSequence)
        accepted, slot, length = 0, call.first, int(call.positions[0]) + 1
        for row, proposed in enumerate([*proposal.tokens, None]):
            self._accept_tokens([sequence], logits[row : row + 1])
            if sequence.status is SequenceStatus.FINISHED or not sequence.request.active:
                break
            if sequence.sampler.generated[-1] != proposed:
                break
            accepted += 1
        self.cache.trim(slot, length + accepted)
        self.stats.count_proposal(len(proposal.tokens), accepted, drafted=proposal.draft_length is not None)
        if proposal.draft_length is not None:
            proposal.draft_length.learn(len(proposal.tokens), accepted)

    def _accept(self, call: Call, logits: Logits) -> None:
        """Choose the next tokens of the call's sequences, and emit their text."""
        sequences = call.sequences
        singles = [sequence for sequence in sequences if isinstance(sequence, GeneratedSequence)]
        if len(singles) == len(sequences):
            if singles:
                self._accept_tokens(singles, logits)
            return
        start, own = 0, []
        for sequence in sequences:
            count = len(sequence.inputs())
            if isinstance(sequence, BeamSequence):
                own_rows = logits[start : start + count]
                assert isinstance(own_rows, (np.ndarray, ScoredCandidates)), "`best` runs no searches"
                self._accept_beams(sequence, own_rows if isinstance(own_rows, ScoredCandidates) else list(own_rows))
            else:
                own.append(start)
            start += count
        if singles:
            self._accept_tokens(singles, logits[own])

    def _accept_tokens(self, sequences: list[GeneratedSequence], logits: Logits) -> None:
        """Choose a token for each row, and emit its text; an error fails that row's request alone."""
        samplers = [sequence.sampler for sequence in sequences]
        choices: list[TokenChoice | Exception]
        try:
            choices = list(choose(logits, samplers))
        except Exception as error:
            LOG.warning("choosing for %d rows failed, each is tried alone: %r", len(samplers), error)
            choices = [_choose_alone(logits[row : row + 1], sampler) for row, sampler in enumerate(samplers)]
        now = time.monotonic()
        for sequence, choice in zip(sequences, choices):
            if isinstance(choice, Exception):
                self.scheduler.refuse(sequence.request, choice)
                continue
            self._count_first(sequence.request, now)
            try:
                self._advance(sequence, choice, now)
            except Exception as error:
                self.scheduler.refuse(sequence.request, error)

    def _advance(self, sequence: GeneratedSequence, choice: TokenChoice, now: float) -> None:
        """Append a chosen token, and the forced tokens after it if they need no steps."""
        goes_on = self._append(sequence, choice, now)
        sampler = sequence.sampler
        if sampler.guide is None or not goes_on:
            return
        forced = sampler.forced if sampler.options.logprobs < 0 else []  # these requests need the logits of every token
        if forced and self.scheduler.fast_forward(sequence, len(forced)):
            for token in list(forced):
                goes_on = goes_on and self._append(sequence, TokenChoice(token), now)
        if goes_on:
            sampler.guide.prepare()

    def _append(self, sequence: GeneratedSequence, choice: TokenChoice, now: float) -> bool:
        """Append one token and emit its text; return False if the sequence ends with it."""
        self.stats.generated_tokens += 1
        piece = sequence.advance(choice, self.cache.max_length)
        if piece is None:
            return True
        if piece.finish_reason:
            self._finish(sequence, [piece], now)
        elif sequence.request.active:
            self._pieces.setdefault(sequence.request, []).append(piece)
        return not piece.finish_reason

    def _accept_beams(self, beams: BeamSequence, logits: list[np.ndarray] | ScoredCandidates) -> None:
        """Let a search choose its next beams, and copy their keys and values to the slots that continue them."""
        now = time.monotonic()
        try:
            parents = beams.search.step(logits)
        except Exception as error:
            self.scheduler.refuse(beams.request, error)
            return
        self._count_first(beams.request, now)
        if beams.search.is_done:
            try:
                pieces = beams.pieces()
                self.stats.generated_tokens += sum(piece.completion_tokens for piece in pieces)
                self._finish(beams, pieces, now)
            except Exception as error:
                self.scheduler.refuse(beams.request, error)
            return
        beams.slots, copies = reorder(beams.slots, parents)
        for source, target in copies:
            self.stats.moved_positions += self.cache.fork(source, target)

    def _count_first(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self.stats.first_token_seconds += now - request.arrived
            self.stats.first_tokens += 1

    def _finish(self, sequence: RunningSequence, pieces: list[AnswerPiece], now: float) -> None:
        """Free the slots of a sequence that ended, then emit its last pieces."""
        self.scheduler.finish(sequence)
        self.stats.token_seconds += now - (sequence.request.first_token or now)
        self.stats.later_tokens += sum(piece.completion_tokens for piece in pieces) - len(pieces)
        if sequence.request.active:
            self._pieces.setdefault(sequence.request, []).extend(pieces)

    def _deliver(self) -> None:
        """Emit the pieces that calls gave, through `defer`: writing them may be slow (JSON), and the next step waits.

        Tokens that a sequence got at once are one piece: each is a message to its client.
        """
        for request, pieces in self._pieces.items():
            if request.status is not RequestStatus.FAILED:
                request.defer(partial(self._emit, request, join_pieces(pieces)))
        self._pieces = {}

    def _emit(self, request: Request, pieces: Sequence[AnswerPiece]) -> None:
        """Emit `pieces`, unless the request failed or was cancelled; an error fails that request alone."""
        try:
            for piece in pieces:
                if not request.undeliverable and request.status is not RequestStatus.CANCELLED:
                    request.emit(piece)
        except Exception as error:
            request.undeliverable = True
            self.scheduler.refuse(request, error)


def _choose_alone(logits: Logits, sampler: Sampler) -> TokenChoice | Exception:
    try:
        return choose(logits, [sampler])[0]
    except Exception as error:
        return error

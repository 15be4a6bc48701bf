"""Build the calls of a step: the tokens of slots that the executor runs, and the sequences that get its logits.

Knows sequences and slots; does not know the order in which sequences run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .block_manager import PendingWrite
from .sequences import GeneratedSequence, Request, RunningSequence, SequenceStatus
from .slot_cache import SlotCache
from .speculation import DRAFT_PROBABILITY, Drafter, DraftLength

MAX_SCORED_TOKENS = 64  # prompt tokens of a call that returns logits for each of them, up to 0.6 MB a token
PromptChunk = tuple[RunningSequence, Sequence[int]]  # the sequence, and tokens of its prompt


@dataclass(frozen=True)
class Proposal:
    """Speculative tokens of a sequence, at least one; `draft_length`, if a draft proposed them, learns from them."""

    tokens: Sequence[int]
    draft_length: DraftLength | None = None


@dataclass(frozen=True)
class Call:
    """One run of the executor over the slots from `first` on.

    `tokens`: (rows, new) int64, written at `positions`, (rows,) int64, of each slot; `written`: the valid tokens, by
    slot; `logits_positions`: see Executor.run. `sequences` get their next tokens from the last of these logits, one row
    for each of their inputs, in order. `scored`: the request whose prompt the logits score. `proposal`: the speculative
    tokens of the call's only sequence, `tokens` after the first.
    """

    first: int
    tokens: np.ndarray
    positions: np.ndarray
    written: Mapping[int, Sequence[int]]
    logits_positions: np.ndarray
    sequences: Sequence[RunningSequence]
    scored: Request | None = None
    proposal: Proposal | None = None


def next_chunk(cache: SlotCache, sequence: RunningSequence, limit: int) -> Sequence[int]:
    """Return the next tokens of a prompt, at most `limit`."""
    length = cache.length(sequence.slots[0])
    return sequence.tokens[length : length + (min(limit, MAX_SCORED_TOKENS) if sequence.request.scored else limit)]


def prefill_call(cache: SlotCache, sequence: RunningSequence, tokens: Sequence[int]) -> Call:
    """Return the call that prefills `tokens` of a prompt; after the last of them the sequence decodes."""
    request, slot = sequence.request, sequence.slots[0]
    scored, length = request.scored, cache.length(slot)
    ends = length + len(tokens) == len(sequence.tokens)
    if ends:
        sequence.status = SequenceStatus.DECODING
    row, positions = np.array([tokens], np.int64), np.array([length], np.int64)
    logits_positions = np.arange(len(tokens)) if scored else np.array([len(tokens) - 1])
    finished = [sequence] if ends else []
    return Call(slot, row, positions, {slot: tokens}, logits_positions, finished, request if scored else None)


def join_prefills(cache: SlotCache, chunks: Sequence[PromptChunk], limit: int) -> list[list[PromptChunk]]:
    """Group `chunks` into calls: starts of prompts in adjacent slots, padded to the longest.

    A group has up to `limit` tokens, of which at most half are padding. A chunk that is scored, or continues a prompt,
    is alone. Groups are ordered by their earliest chunk.
    """
    arrivals = {sequence.slots[0]: index for index, (sequence, _) in enumerate(chunks)}
    groups: list[list[PromptChunk]] = []
    for one in sorted(chunks, key=lambda one: one[0].slots[0]) if limit else chunks:
        if groups and _can_join(cache, groups[-1], one, limit):
            groups[-1].append(one)
        else:
            groups.append([one])
    return sorted(groups, key=lambda group: min(arrivals[sequence.slots[0]] for sequence, _ in group))


def _can_join(cache: SlotCache, group: Sequence[PromptChunk], one: PromptChunk, limit: int) -> bool:
    rows = [*group, one]
    lengths = [len(tokens) for _, tokens in rows]
    padded = len(rows) * max(lengths)
    if one[0].slots[0] != group[-1][0].slots[0] + 1 or padded > min(limit, 2 * sum(lengths)):
        return False
    return not any(cache.length(sequence.slots[0]) or sequence.request.scored for sequence, _ in rows)


def decode_call(cache: SlotCache, sequences: Sequence[RunningSequence]) -> Call:
    """Return the call that runs one token of each sequence and beam."""
    first, last = cache.allocated_range()
    tokens = np.zeros((last - first, 1), np.int64)
    inputs = _next_inputs(sequences)
    for slot, token in inputs:
        tokens[slot - first, 0] = token
    written = {slot: (token,) for slot, token in inputs}
    rows = np.array([slot - first for slot, _ in inputs])
    return Call(first, tokens, cache.write_positions(first, last), written, rows, sequences)


def speculative_call(
    cache: SlotCache, sequence: RunningSequence, limit: int, least: float, drafter: Drafter | None
) -> Call | None:
    """Return a call that verifies up to `limit` speculative tokens of a sequence; None if none are proposed.

    `least`: see PromptLookup.propose.
    """
    if not isinstance(sequence, GeneratedSequence):
        return None
    proposal = _propose(sequence, min(limit, sequence.max_speculative(cache.max_length)), least, drafter)
    if proposal is None:
        return None
    (slot,), tokens = sequence.slots, [*sequence.inputs(), *proposal.tokens]
    positions = np.array([cache.length(slot)], np.int64)
    logits_positions = np.arange(len(tokens))
    return Call(
        slot, np.array([tokens], np.int64), positions, {slot: tokens}, logits_positions, [sequence], proposal=proposal
    )


def _propose(sequence: GeneratedSequence, limit: int, least: float, drafter: Drafter | None) -> Proposal | None:
    """Return up to `limit` tokens of prompt lookup or, if it finds none, of the draft model."""
    if not limit:
        return None
    length = 0 if drafter is None else min(limit, drafter.budget, sequence.draft_length.next(sequence.generated))
    if tokens := sequence.propose_by_lookup(limit, max(least, DRAFT_PROBABILITY) if length else least):
        return Proposal(tokens)
    if drafter is None or not length:
        return None
    tokens = drafter.propose(sequence.arrival, sequence.tokens, length, sequence.slots[0])
    drafter.budget -= len(tokens)
    return Proposal(tokens, sequence.draft_length) if tokens else None


def pending_write(call: Call) -> PendingWrite:
    """Return the positions that a call of one slot writes."""
    start = int(call.positions[0])
    return PendingWrite(call.first, start, start + call.tokens.shape[1])


def pending_writes(
    cache: SlotCache, sequences: Sequence[RunningSequence], chunks: Iterable[PromptChunk]
) -> list[PendingWrite]:
    """Return the positions that decoding `sequences` and prefilling `chunks` write."""
    written = [(slot, 1) for slot, _ in _next_inputs(sequences)]
    written += [(sequence.slots[0], len(tokens)) for sequence, tokens in chunks]
    return [PendingWrite(slot, cache.length(slot), cache.length(slot) + count) for slot, count in written]


def _next_inputs(sequences: Iterable[RunningSequence]) -> list[tuple[int, int]]:
    """Return (slot, token) of each sequence and beam."""
    return [(slot, token) for sequence in sequences for slot, token in zip(sequence.slots, sequence.inputs())]

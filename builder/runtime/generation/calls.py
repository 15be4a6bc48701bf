"""Build the calls of a step: which tokens of which slots the executor runs, and which sequences get its logits.

Knows sequences and the contents of their slots; does not know whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Growth
from .cache import SlotCache
from .drafting import Drafter
from .lookup import Lookup
from .pace import Pace
from .sequences import GeneratedSequence, Request, Running, SequenceStatus

SCORED_TOKENS = 64  # of a prompt in one call with logits for each: 0.6 MB a token with a large vocabulary
PromptPiece = tuple[Running, Sequence[int]]  # the sequence, and tokens of its prompt


@dataclass(frozen=True)
class Guess:
    """Tokens that a sequence may generate next, at least one; `by` learns how many of them were right."""

    tokens: Sequence[int]
    by: Lookup | Pace


@dataclass(frozen=True)
class Call:
    """One run of the executor over the slots from `first` on.

    `tokens`: (rows, new) int64, written at `positions`, (rows,) int64, of each slot; `written`: the valid tokens, by
    slot; `wanted`: the tokens after which logits are needed, see Executor.run. `sequences` get their next tokens from
    the last of these logits, one row for each of their inputs, in order. `scored`: the request whose prompt these
    logits score. `guess`: the guess of the call's only sequence, which is `tokens` after the first.
    """

    first: int
    tokens: np.ndarray
    positions: np.ndarray
    written: Mapping[int, Sequence[int]]
    wanted: np.ndarray
    sequences: Sequence[Running]
    scored: Request | None = None
    guess: Guess | None = None


def piece(cache: SlotCache, sequence: Running, most: int) -> Sequence[int]:
    """Return the next tokens of a prompt, at most `most`."""
    length = cache.length(sequence.slots[0])
    return sequence.tokens[length : length + (min(most, SCORED_TOKENS) if sequence.request.scored else most)]


def prefill(cache: SlotCache, sequence: Running, tokens: Sequence[int]) -> Call:
    """Return the call of a piece of a prompt; if it is the last piece, the sequence decodes from then on."""
    request, slot = sequence.request, sequence.slots[0]
    scored, length = request.scored, cache.length(slot)
    ends = length + len(tokens) == len(sequence.tokens)
    if ends:
        sequence.status = SequenceStatus.DECODING
    row, positions = np.array([tokens], np.int64), np.array([length], np.int64)
    wanted = np.arange(len(tokens)) if scored else np.array([len(tokens) - 1])
    finished = [sequence] if ends else []
    return Call(slot, row, positions, {slot: tokens}, wanted, finished, request if scored else None)


def joined(cache: SlotCache, pieces: Sequence[PromptPiece], most: int) -> list[list[PromptPiece]]:
    """Group `pieces` into calls: starts of prompts in adjacent slots, padded to the longest.

    A group has up to `most` tokens with its padding, and at most half of them are padding, so that a step is at most
    twice as long as its tokens; a piece that is scored, or continues a prompt, is alone. Groups are ordered by their
    earliest piece.
    """
    arrivals = {sequence.slots[0]: index for index, (sequence, _) in enumerate(pieces)}
    groups: list[list[PromptPiece]] = []
    for one in sorted(pieces, key=lambda one: one[0].slots[0]) if most else pieces:
        if groups and _joins(cache, groups[-1], one, most):
            groups[-1].append(one)
        else:
            groups.append([one])
    return sorted(groups, key=lambda group: min(arrivals[sequence.slots[0]] for sequence, _ in group))


def _joins(cache: SlotCache, group: Sequence[PromptPiece], one: PromptPiece, most: int) -> bool:
    rows = [*group, one]
    lengths = [len(tokens) for _, tokens in rows]
    padded = len(rows) * max(lengths)
    if one[0].slots[0] != group[-1][0].slots[0] + 1 or padded > min(most, 2 * sum(lengths)):
        return False
    return not any(cache.length(sequence.slots[0]) or sequence.request.scored for sequence, _ in rows)


def step(cache: SlotCache, sequences: Sequence[Running]) -> Call:
    """Return the call that runs one token of each sequence and beam."""
    first, last = cache.range()
    tokens = np.zeros((last - first, 1), np.int64)
    inputs = _inputs(sequences)
    for slot, token in inputs:
        tokens[slot - first, 0] = token
    written = {slot: (token,) for slot, token in inputs}
    rows = np.array([slot - first for slot, _ in inputs])
    return Call(first, tokens, cache.positions(first, last), written, rows, sequences)


def guess(cache: SlotCache, sequence: Running, most: int, drafter: Drafter | None) -> Call | None:
    """Return a call of one sequence with up to `most` guessed tokens after its next; None without a guess."""
    if not isinstance(sequence, GeneratedSequence):
        return None
    guessed = _guessed(sequence, min(most, sequence.room(cache.max_length)), drafter)
    if guessed is None:
        return None
    (slot,), tokens = sequence.slots, [*sequence.inputs(), *guessed.tokens]
    positions = np.array([cache.length(slot)], np.int64)
    wanted = np.arange(len(tokens))
    return Call(slot, np.array([tokens], np.int64), positions, {slot: tokens}, wanted, [sequence], guess=guessed)


def _guessed(sequence: GeneratedSequence, most: int, drafter: Drafter | None) -> Guess | None:
    """Return up to `most` tokens that followed the same ones before or, if none did, that the draft model predicts."""
    if not most:
        return None
    if tokens := sequence.looked_up(most):
        return Guess(tokens, sequence.lookup)
    if drafter is None:
        return None
    ahead = min(most, sequence.pace.ahead(sequence.generated))
    tokens = drafter.guess(sequence.turn, sequence.tokens, ahead) if ahead else []
    return Guess(tokens, sequence.pace) if tokens else None


def growth(call: Call) -> Growth:
    """Return the positions that a call of one row writes."""
    start = int(call.positions[0])
    return Growth(call.first, start, start + call.tokens.shape[1])


def growths(cache: SlotCache, sequences: Sequence[Running], pieces: Iterable[PromptPiece]) -> list[Growth]:
    """Return the positions that a step of `sequences` and `pieces` of prompts writes."""
    written = [(slot, 1) for slot, _ in _inputs(sequences)]
    written += [(sequence.slots[0], len(tokens)) for sequence, tokens in pieces]
    return [Growth(slot, cache.length(slot), cache.length(slot) + count) for slot, count in written]


def _inputs(sequences: Iterable[Running]) -> list[tuple[int, int]]:
    """Return (slot, token) of each sequence and beam."""
    return [(slot, token) for sequence in sequences for slot, token in zip(sequence.slots, sequence.inputs())]

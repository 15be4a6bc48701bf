"""Pad prompts on the right to few lengths, and join those that begin in adjacent slots as rows of one call.

An operator over a cache accepts several tokens a row, padded on the right, if all rows start empty (onnxruntime,
group_query_attention_helper.h, CheckInputs; group_query_attention_impl.cu, GetSequenceLengths). What it writes after a
row's own tokens is unused, as are all positions there: a piece of one row may be padded after any past.

Lengths are powers of two, because an arena that grows by what is requested (kSameAsRequested) keeps a region for each
call that is larger than all before it. For one prompt those regions are together smaller than twice the largest; for
each of the lengths 1 to n they would be n / 2 times the largest (onnxruntime, core/framework/bfc_arena.cc, Extend).
Knows shapes; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import CallPart

MIN_PADDED_TOKENS = 16  # tokens


def bucket(tokens: int, longest: int) -> int:
    """Return the length that `tokens` tokens are padded to: a power of two, but at most `longest`."""
    return min(max(MIN_PADDED_TOKENS, 1 << (tokens - 1).bit_length()), longest)


def padded(parts: "Sequence[CallPart]", longest: int) -> "tuple[CallPart, np.ndarray | None]":
    """Return one part for `parts`, of slots of `longest` tokens, and how many of each row's tokens are its own.

    The counts are None for decoding rows, which stay as they are, and for a single row: its padding is written after
    its own tokens as if it were more of them, and the row's next call overwrites it.
    """
    if len(parts) == 1 and (len(parts[0].tokens) > 1 or parts[0].tokens.shape[1] == 1):
        return parts[0], None
    counts = np.array([part.tokens.shape[1] for part in parts])
    width = bucket(int(counts.max()), longest - int(parts[0].lengths[0]))
    tokens = np.zeros((len(parts), width), np.int64)
    for row, part in enumerate(parts):
        tokens[row, : counts[row]] = part.tokens[0]
    logits_positions = np.concatenate([row * width + part.logits_indices for row, part in enumerate(parts)])
    lengths = np.concatenate([part.lengths for part in parts])
    return CallPart(parts[0].first, tokens, lengths, logits_positions), counts if len(parts) > 1 else None


def places(parts: "Sequence[CallPart]") -> "list[slice]":
    """Return the rows of each part in the logits of the part that `padded` returned."""
    ends = np.cumsum([len(part.logits_indices) for part in parts]).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]

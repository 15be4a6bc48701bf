"""Join texts that begin in adjacent slots as rows of one call, padded on the right to the longest.

An operator over a cache accepts several tokens a row, padded on the right, if all rows start empty (onnxruntime,
group_query_attention_helper.h, CheckInputs; group_query_attention_impl.cu, GetSequenceLengths). What it writes after a
row's own tokens is unused, as are all positions there. Knows shapes; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import CallPart


def padded(parts: "Sequence[CallPart]") -> "tuple[CallPart, np.ndarray | None]":
    """Join several parts; return the part and the token count of each row, or a single part unchanged and None."""
    if len(parts) == 1:
        return parts[0], None
    counts = np.array([part.tokens.shape[1] for part in parts])
    tokens = np.zeros((len(parts), counts.max()), np.int64)
    for row, part in enumerate(parts):
        tokens[row, : counts[row]] = part.tokens[0]
    logits_positions = np.concatenate([row * counts.max() + part.logits_indices for row, part in enumerate(parts)])
    return CallPart(parts[0].first, tokens, np.zeros(len(parts), np.int64), logits_positions), counts


def places(parts: "Sequence[CallPart]") -> "list[slice]":
    """Return the rows of each part in the logits of the part that `padded` returned."""
    ends = np.cumsum([len(part.logits_indices) for part in parts]).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]

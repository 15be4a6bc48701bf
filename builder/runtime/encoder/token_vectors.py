"""Answer one vector a token: where each token is in its text, and rows of the same size for texts of any length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding

from ..fields import Field

NOWHERE = -1  # offset of a vector that is not of one token of the text


def vector_outputs(size: int) -> tuple[Field, ...]:
    """Return the tensors of vectors with `size` numbers each."""
    return (
        Field("vectors", "TYPE_FP32", (-1, size)),
        Field("offsets", "TYPE_INT32", (-1, 2)),
        Field("vector_count", "TYPE_INT32"),
    )


def text_offsets(encoding: Encoding, prompt: int) -> np.ndarray:
    """Return where each token is in the text after its first `prompt` characters; -1 for a token that is not in it."""
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2) - prompt
    outside = np.array(encoding.special_tokens_mask, bool) | (offsets[:, 1] <= 0)
    return np.where(outside[:, None], NOWHERE, np.maximum(offsets, 0)).astype(np.int32)


def padded(embedded: Sequence[tuple[np.ndarray, np.ndarray]], size: int) -> dict[str, np.ndarray]:
    """Return the `vector_outputs` of texts, from the vectors (n, size) and the offsets (n, 2) of each."""
    counts = np.array([[len(vectors)] for vectors, _ in embedded], np.int32)
    shape = len(embedded), max(1, int(counts.max()))
    vectors, offsets = np.zeros((*shape, size), np.float32), np.full((*shape, 2), NOWHERE, np.int32)
    for row, (own, places) in enumerate(embedded):
        vectors[row, : len(own)], offsets[row, : len(own)] = own, places
    return {"vectors": vectors, "offsets": offsets, "vector_count": counts}

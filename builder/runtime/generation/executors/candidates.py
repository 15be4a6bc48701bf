"""Name the graph outputs that carry the most probable next tokens, and put these in order.

On a GPU only they leave the device, not all logits (builder/graphs/onnx/candidates.py); on a CPU a beam search reads
them, with the totals that make them log-probabilities (builder/graphs/onnx/likeliest.py). Knows logits; knows no engine
and no sampling.
"""

from __future__ import annotations

import numpy as np

from .base import TokenCandidates

MAX_CANDIDATES = (
    128  # above the usual top_k of requests, and below the limit of newer CUDA kernels (256, topk_hybrid.cuh)
)
TOP_LOGITS, TOP_TOKENS = "top_logits", "top_tokens"  # outputs of a graph that finds candidates
TOP_TOTALS, TOP_COUNT = "top_totals", "top_count"  # for searches: an output, and the input with the count


def in_order(candidates: TokenCandidates) -> TokenCandidates:
    """Sort equal logits by token: CUDA's TopK leaves them as its threads found them (onnxruntime, topk_impl.cuh)."""
    order = np.lexsort((candidates.tokens, -candidates.logits), axis=-1)
    return TokenCandidates(
        *(np.take_along_axis(part, order, axis=-1) for part in (candidates.tokens, candidates.logits))
    )

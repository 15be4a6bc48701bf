"""The most probable next tokens as a graph finds them where it runs. Knows logits; knows no engine and no sampling.

On a GPU they leave it alone (builder/onnx/candidates.py); on a CPU they are what a beam search reads, with what makes
them log-probabilities (builder/onnx/likeliest.py).
"""

from __future__ import annotations

import numpy as np

from .base import Candidates

MOST = 128  # beyond what requests send as top_k, and below what newer CUDA kernels end at (256, topk_hybrid.cuh)
TOP_LOGITS, TOP_TOKENS = "top_logits", "top_tokens"  # outputs of a graph that finds candidates
TOP_TOTALS, TOP_COUNT = "top_totals", "top_count"  # one more of a graph for searches, and its input: how many


def in_order(candidates: Candidates) -> Candidates:
    """Equal logits by token: CUDA's TopK leaves them as its threads found them (onnxruntime, topk_impl.cuh)."""
    order = np.lexsort((candidates.tokens, -candidates.logits), axis=-1)
    return Candidates(*(np.take_along_axis(part, order, axis=-1) for part in (candidates.tokens, candidates.logits)))

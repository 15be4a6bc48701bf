"""Architectures of decoders that the fused attention over a cache cannot compute, and why: a property of each."""

from __future__ import annotations

from transformers import PreTrainedModel

from builder.common.errors import ExportError

REASONS = {
    "blt": "it reads bytes, in patches that a second model cuts: it has no tokens of a tokeniser",
    "deepseek_v4": (
        "its tokens see summaries of windows of the text, which it appends as each window ends: memory that grows more "
        "slowly than keys and values"
    ),
    "prophetnet": (
        "it predicts from a second stream, each of whose tokens sees itself beside the keys of the first; the fused "
        "attention over a cache sees the cache alone"
    ),
    "reformer": (
        "its tokens see those in the buckets that random hashes put them into; the fused attention over a cache sees "
        "all of them"
    ),
}


def refuse_unserved(model: PreTrainedModel) -> None:
    """Raise ExportError if `model` is of an architecture that cannot be computed."""
    why = REASONS.get(model.config.model_type)
    if why is not None:
        raise ExportError(why)

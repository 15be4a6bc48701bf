"""Layers that the cache of an export does not support are refused by name."""

from __future__ import annotations

import pytest
import torch

from builder.common.errors import ExportError
from builder.graphs.export.cached_attention import group_query_attention
from builder.graphs.export.caches import ExportCache, exporting


def _cache(key_heads: int) -> ExportCache:
    past = [torch.zeros(2, key_heads, 40, 8) for _ in range(2)]
    return ExportCache(past, torch.tensor([6, 6], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))


def test_key_heads_repeated_by_the_model_are_refused() -> None:
    """Regression: JetMoE repeats key heads between cache and attention, and ONNX Runtime refused the graph."""
    cache, states = _cache(key_heads=2), torch.zeros(2, 4, 7, 8)
    cache.update(states[:, :2], states[:, :2], 0)
    with exporting(cache), pytest.raises(ExportError, match="has 4 key heads where its cache has 2"):
        group_query_attention(states, states, states, 1.0)


def test_layers_with_another_state_are_refused() -> None:
    """Regression: convolution states and compressed keys (Falcon-H1, DeepSeek-V4) ended in an IndexError."""
    with pytest.raises(ExportError, match="keep a state that its cache does not show"):
        _cache(key_heads=2).get_conv_state(0)

"""BLOOM: ALiBi (arXiv:2108.12409), a bias that grows with the key's position, in place of position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, _get_alibi_slopes

from builder.graphs.export.cached_attention import group_query_attention, position_bias


def bias_heads(config: BloomConfig) -> int:
    return config.n_head


def _forward(
    self: BloomAttention,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    key, value = layer_past.update(key, value, self.layer_idx)
    slopes = _get_alibi_slopes(self.num_heads, query.device)[:, None]
    bias = position_bias(lambda positions: slopes * positions, query.shape[2])
    output = group_query_attention(query, key, value, self.inv_norm_factor, attention_bias=bias)
    return residual + self.dense(output.flatten(-2)), None


REPLACED = (BloomAttention, "forward", _forward)

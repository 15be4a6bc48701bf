"""MPT: ALiBi (arXiv:2108.12409); softmax does not see where the bias is zero, so it starts at the first key."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from builder.graphs.export.cached_attention import group_query_attention, position_bias


def bias_heads(config: MptConfig) -> int:
    return config.n_heads


def _forward(
    self: MptAttention, hidden_states: torch.Tensor, past_key_values: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    batch, sequence = hidden_states.shape[:2]
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.reshape(batch, sequence, self.n_heads, self.head_dim).transpose(1, 2) for part in projected.chunk(3, dim=2)
    )
    key, value = past_key_values.update(key, value, self.layer_idx)
    slopes = -build_mpt_alibi_tensor(self.n_heads, 2)[:, 0, :1]  # of the two positions -1 and 0
    bias = position_bias(lambda positions: slopes * positions, sequence)
    output = group_query_attention(query, key, value, self.softmax_scale, attention_bias=bias)
    return self.out_proj(output.flatten(-2)), None


REPLACED = (MptAttention, "forward", _forward)

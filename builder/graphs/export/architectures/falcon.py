"""Falcon: rotary or ALiBi (arXiv:2108.12409) by its configuration; its ALiBi is rounded to bfloat16, and so here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import FalconConfig
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention

from builder.graphs.export.cached_attention import group_query_attention, position_bias


def bias_heads(config: FalconConfig) -> int:
    return config.num_attention_heads if config.alibi else 0


def _forward(
    self: FalconAttention,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    split = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in split)
    bias = None
    if alibi is None:
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        # (heads, 1), as the architecture's own function has them at the second of two positions
        slopes = modeling_falcon.build_alibi_tensor(torch.ones((1, 2)), self.num_heads, torch.float32)[:, 0, 1:]

        def rounded(positions: torch.Tensor) -> torch.Tensor:
            near = positions.to(torch.bfloat16).to(torch.float32)
            return (slopes * near).to(torch.bfloat16).to(torch.float32) * self.inv_norm_factor

        bias = position_bias(rounded, query.shape[2])
    key, value = layer_past.update(key, value, self.layer_idx)
    output = group_query_attention(query, key, value, self.inv_norm_factor, attention_bias=bias)
    return self.dense(output.flatten(-2)), None


REPLACED = (FalconAttention, "forward", _forward)

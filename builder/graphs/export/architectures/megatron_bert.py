"""Megatron-BERT: the attention of BERT, computed in a method of its own, of encoders and decoders."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertSelfAttention

from builder.graphs.export.attention import multi_head_attention, refuse_unknown
from builder.graphs.export.cached_attention import group_query_attention


def attend(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as BERT's self-attention does, over heads of `attention_head_size`."""
    refuse_unknown(options)
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)
        for project in (self.query, self.key, self.value)
    )
    scale = self.attention_head_size**-0.5
    if past_key_values is None:
        return multi_head_attention(query, key, value, scale, attention_bias=attention_mask).flatten(2), None
    key, value = past_key_values.update(key, value, self.layer_idx)
    return group_query_attention(query, key, value, scale).flatten(2), None


REPLACED = (MegatronBertSelfAttention, "forward", attend)

"""RoFormer: BERT's attention with rotated pairs of neighbours, computed in a method of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from builder.graphs.export.attention import multi_head_attention, refuse_unknown
from builder.graphs.export.cached_attention import group_query_attention


def _forward(
    self: RoFormerSelfAttention,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    sinusoidal_pos: torch.Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; sinusoidal_pos: (1, 1, sequence, head size), over a cache (1, 1, batch, sequence, head size)."""
    refuse_unknown(options)
    assert sinusoidal_pos is not None
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)
        for project in (self.query, self.key, self.value)
    )
    rows = sinusoidal_pos if past_key_values is None else sinusoidal_pos[0, 0].unsqueeze(1)
    query, key = self.apply_rotary_position_embeddings(rows, query, key)
    if self.rotary_value:
        value, _ = self.apply_rotary_position_embeddings(rows, value, value)
    scale = self.attention_head_size**-0.5
    if past_key_values is None:
        return multi_head_attention(query, key, value, scale, attention_bias=attention_mask).flatten(2), None
    key, value = past_key_values.update(key, value, self.layer_idx)
    return group_query_attention(query, key, value, scale).flatten(2), None


REPLACED = (RoFormerSelfAttention, "forward", _forward)

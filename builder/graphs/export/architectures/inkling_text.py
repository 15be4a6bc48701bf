"""Inkling: a bias by the distance of a key, which each query has for itself, and scores that grow with its position."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, pad
from transformers import InklingTextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.inkling.modeling_inkling import InklingAttention

from builder.graphs.export.cached_attention import key_distances, token_positions


def bias_heads(config: InklingTextConfig) -> int:
    return max(config.num_attention_heads, config.swa_num_attention_heads)


def by_distance(self: Any, relative: torch.Tensor, *positions: Any) -> torch.Tensor:
    """Return the bias of queries that mix profiles by distance, `self.proj`, with weights `relative`.

    relative: (batch, sequence, heads, profiles). Returns (batch, heads, sequence, total length), found by one index for
    all heads: an index of that shape takes twice as much memory as the bias.
    """
    profiles = (relative @ self.proj).transpose(2, 3)  # (batch, sequence, distances, heads)
    profiles = pad(profiles, (0, 0, 0, 1))  # a distance beyond the others, of keys with no bias
    distance = key_distances()
    place = torch.where((distance >= 0) & (distance < self.rel_extent), distance, self.rel_extent)
    first = torch.arange(place.shape[0] * place.shape[1]).reshape(place.shape[0], place.shape[1], 1)
    rows = first * (self.rel_extent + 1) + place
    return embedding(rows, profiles.flatten(0, 2)).permute(0, 3, 1, 2)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    past_key_values: Any,
    conv_mask: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    key, value = (
        convolution(project(hidden_states), past_key_values=past_key_values)
        for project, convolution in ((self.k_proj, self.k_sconv), (self.v_proj, self.v_sconv))
    )
    query, key, value = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (self.q_proj(hidden_states), key, value))
    query, key, value = (heads.transpose(1, 2) for heads in (self.q_norm(query), self.k_norm(key), value))
    relative = self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
    if not self.is_sliding and self.config.log_scaling_n_floor is not None:
        grown = ((token_positions() + 1).float() / self.config.log_scaling_n_floor).clamp(min=1.0)
        scale = (1.0 + self.config.log_scaling_alpha * grown.log())[..., None, None]
        query, relative = query * scale.transpose(1, 2), relative * scale
    bias = by_distance(self.rel_logits_proj, relative)
    key, value = past_key_values.update(key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, position_bias=bias, **options)
    return self.o_proj(output.flatten(2)), None


REPLACED = (InklingAttention, "forward", _forward)

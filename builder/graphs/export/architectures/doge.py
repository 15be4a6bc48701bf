"""Doge: dynamic mask attention (arXiv:2412.11834), in which the value of a key adds to the key's scores.

What it adds is one more number of the key, which queries multiply by 1. Of texts longer than `keep_window_size` tokens
the attention leaves keys out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DogeConfig
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention

from builder.graphs.export.attention import GROUPED_SIZES
from builder.graphs.export.cached_attention import group_query_attention
from builder.graphs.export.caches import is_exporting
from builder.graphs.export.masks import unchanged
from builder.runtime.contract import LayerShape


def layers(config: DogeConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of each layer, in a multiple of the numbers that the operator takes."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for _ in range(config.num_hidden_layers):
        yield LayerShape(config.num_key_value_heads, size + GROUPED_SIZES - size % GROUPED_SIZES)


def full_attention_limit(config: DogeConfig) -> int:
    """Return the most tokens of a text in which each attends to all before it."""
    return config.keep_window_size


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if not is_exporting():
        result: tuple[torch.Tensor, None] = _original(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **options
        )
        return result
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    values = self.v_proj(hidden_states)
    query, key = modeling_doge.apply_rotary_pos_emb(query, key, *position_embeddings)
    added = torch.exp(self.A * torch.nn.functional.softplus(self.dt_proj(values))).transpose(1, 2)
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    key = torch.cat([key, added[..., None] / self.scaling], dim=-1)
    key, value = past_key_values.update(key, values.view(shape).transpose(1, 2), self.layer_idx)
    window = unchanged(attention_mask, self.layer_idx).window
    return self.o_proj(group_query_attention(query, key, value, self.scaling, window).flatten(2)), None


_original = DogeAttention.forward
REPLACED = (DogeAttention, "forward", _forward)

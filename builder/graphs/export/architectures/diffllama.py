"""DiffLlama: differential attention (arXiv:2410.05258).

transformers attends twice with the same queries and keys, to the first half of the value heads and to the second. Here
one attention has both as its values, which are then twice as long as its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DiffLlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.diffllama import modeling_diffllama
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from builder.runtime.contract import LayerShape


def layers(config: DiffLlamaConfig) -> Iterator[LayerShape]:
    """Yield the keys and the values of both attentions of each layer."""
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    for _ in range(config.num_hidden_layers):
        yield LayerShape(config.num_key_value_heads, 2 * size)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    query, key = modeling_diffllama.apply_rotary_pos_emb(query, key, *position_embeddings)
    value = torch.cat(value.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **options)
    first, second = output.chunk(2, dim=2)
    factors = ((self.lambda_q1 * self.lambda_k1).sum().exp(), (self.lambda_q2 * self.lambda_k2).sum().exp())
    output = first - (factors[0] - factors[1] + self.lambda_init) * second
    output = (1 - self.lambda_init) * self.groupnorm(output)
    return self.o_proj(output.flatten(2)), None


REPLACED = (DiffLlamaAttention, "forward", _forward)

"""JetMoe: experts of attention, each a query beside the same keys; transformers repeats the keys for each expert."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.jetmoe import modeling_jetmoe
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: Any = None,
    position_embeddings: Any = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Attend with the queries of all experts to a key head side by side, as grouped queries are."""
    queries, logits, routed = self.experts.map(hidden_states)  # (batch, sequence, experts, key heads * size)
    query = queries.unflatten(-1, (-1, self.head_dim)).transpose(2, 3).flatten(2, 3).transpose(1, 2)
    key, value = (
        part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.kv_proj(hidden_states).chunk(2, dim=-1)
    )
    query, key = modeling_jetmoe.apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **options)
    output = output.unflatten(2, (-1, self.top_k)).transpose(2, 3).flatten(3)
    return self.experts.reduce(output, routed), None, logits


REPLACED = (JetMoeAttention, "forward", _forward)

"""Llama 4: rotates by products of complex numbers, scales queries by positions, and routes to experts by itself.

transformers scales the queries of all rows by the positions of one, and runs every expert for every token, on the
token times the sigmoid of the router's logit: 0, and so without effect, for experts that were not chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Llama4TextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import (
    Llama4TextAttention,
    Llama4TextExperts,
    Llama4TextMoe,
    Llama4TextRotaryEmbedding,
)

from builder.graphs.export.caches import running_cache
from builder.graphs.export.complex_rotary import angles, rotate_pairs
from builder.graphs.export.sparse_experts import compute_sparse_experts


def bias_heads(config: Llama4TextConfig) -> int:
    """Return 1: chunks are the same for all heads."""
    return 1


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (projection(hidden_states).view(shape).transpose(1, 2) for projection in projections)
    if self.use_rope:
        query, key = rotate_pairs(query, key, position_embeddings)
        if self.config.use_qk_norm:
            query, key = self.qk_norm(query), self.qk_norm(key)
    elif self.attn_temperature_tuning:  # arXiv:2501.19399
        positions = running_cache().token_positions
        assert positions is not None
        scale = torch.log1p(torch.floor((positions.float() + 1) / self.floor_scale)) * self.attn_scale + 1
        query = query * scale[:, None, :, None]
    key, value = past_key_values.update(key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **options)
    return self.o_proj(output.flatten(-2)), None


def _routed(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the shared expert and, one after the other, each token's chosen ones, on what the router makes of it."""
    tokens = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(tokens)
    weights, chosen = scores.topk(self.top_k, dim=-1)
    result = self.shared_expert(tokens)
    for number in range(self.top_k):
        weight, index = weights[:, number, None], chosen[:, number, None]
        result = result + self.experts(tokens * weight, index, torch.ones_like(weight))
    return result, logits


def _gated(self: Any, products: torch.Tensor) -> torch.Tensor:
    gate, up = products.chunk(2, dim=-1)
    activated: torch.Tensor = self.act_fn(gate) * up
    return activated


LAYOUT = {  # of the experts, as transformers' `use_experts_implementation` says it of others
    "_is_expert_parallel": False,
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_concatenated": True,
    "is_transposed": True,
    "_apply_gate": _gated,
    "forward": compute_sparse_experts,
}
REPLACED = (
    (Llama4TextRotaryEmbedding, "forward", angles),
    (Llama4TextAttention, "forward", _forward),
    (Llama4TextMoe, "forward", _routed),
    *((Llama4TextExperts, name, value) for name, value in LAYOUT.items()),
)

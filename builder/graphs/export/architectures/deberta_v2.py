"""DeBERTa-v2 and v3: content-to-position and position-to-content scores are a bias of their own in each layer.

Disentangled attention (arXiv:2006.03654) is softmax((Q K^T + c2p + p2c) / scale) V, so the fused operator
takes (c2p + p2c) / scale, which the architecture's own function computes, as its attention bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from builder.graphs.export.attention import multi_head_attention


def _forward(
    self: DisentangledSelfAttention,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    output_attentions: bool = False,
    query_states: torch.Tensor | None = None,
    relative_pos: torch.Tensor | None = None,
    rel_embeddings: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    heads, size = self.num_attention_heads, self.attention_head_size
    batch, sequence, _ = hidden_states.shape
    queries = hidden_states if query_states is None else query_states
    query = self.query_proj(queries).view(batch, -1, heads, size).transpose(1, 2)
    key, value = (
        projection(hidden_states).view(batch, -1, heads, size).transpose(1, 2)
        for projection in (self.key_proj, self.value_proj)
    )
    factor = 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))
    bias = torch.zeros((), dtype=query.dtype).masked_fill(~attention_mask.bool(), torch.finfo(query.dtype).min)
    if self.relative_attention:
        relative = self.disentangled_attention_bias(
            query.reshape(-1, query.shape[2], size),
            key.reshape(-1, sequence, size),
            relative_pos,
            rel_embeddings,
            factor,
        )
        bias = bias + relative.view(batch, heads, query.shape[2], sequence)
    context = multi_head_attention(query, key, value, 1 / math.sqrt(size * factor), None, bias)
    return context.flatten(-2), None


REPLACED = (DisentangledSelfAttention, "forward", _forward)

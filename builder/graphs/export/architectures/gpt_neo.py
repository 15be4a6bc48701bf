"""GPT-Neo: unscaled scores, and a window in every other layer; both are attributes of the fused operator."""

from __future__ import annotations

import torch
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from builder.graphs.export.cached_attention import group_query_attention


def _attn(
    self: GPTNeoSelfAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    window = self.config.window_size if self.attention_type == "local" else None
    return group_query_attention(query, key, value, 1.0, window).transpose(1, 2), None


REPLACED = (GPTNeoSelfAttention, "_attn", _attn)

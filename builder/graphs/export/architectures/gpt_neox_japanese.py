"""GPT-NeoX Japanese: scores are computed in a method of its own, which the fused operator replaces."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention

from builder.graphs.export.cached_attention import group_query_attention


def _attn(
    self: GPTNeoXJapaneseAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
) -> tuple[torch.Tensor, None]:
    return group_query_attention(query, key, value, 1 / self.norm_factor).transpose(1, 2), None


REPLACED = (GPTNeoXJapaneseAttention, "_attn", _attn)

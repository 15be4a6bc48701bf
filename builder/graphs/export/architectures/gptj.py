"""GPT-J: scores are computed in a method of its own, which the fused operator replaces."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gptj.modeling_gptj import GPTJAttention

from builder.graphs.export.cached_attention import group_query_attention


def attend(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Attend with scores over the square root of the head size, which `scale_attn` stores."""
    output = group_query_attention(query, key, value, 1 / float(self.scale_attn))
    return output.transpose(1, 2), None


REPLACED = (GPTJAttention, "_attn", attend)

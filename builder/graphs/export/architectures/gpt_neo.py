"""GPT-Neo: unscaled scores, and a window in every other layer; both are attributes of the fused operator."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from builder.graphs.export.architectures import replaced_method
from builder.graphs.export.cached_attention import group_query_attention


def fused(model: PreTrainedModel) -> AbstractContextManager[None]:
    return replaced_method(GPTNeoSelfAttention, _attn, "_attn")


def _attn(
    self: GPTNeoSelfAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    window = self.config.window_size if self.attention_type == "local" else None
    return group_query_attention(query, key, value, 1.0, window).transpose(1, 2), None

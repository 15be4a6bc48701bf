"""MPNet: a relative position bias, shared by the layers, is added to the scores (arXiv:2004.09297)."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from builder.graphs.export.attention import multi_head_attention


def _forward(
    self: MPNetSelfAttention,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor]:
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    query, key, value = (linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
    bias = position_bias
    if attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    context = multi_head_attention(query, key, value, 1 / math.sqrt(self.attention_head_size), None, bias)
    return (self.o(context.flatten(-2)),)


REPLACED = (MPNetSelfAttention, "forward", _forward)

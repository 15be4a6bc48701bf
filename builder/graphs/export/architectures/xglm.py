"""XGLM: the attention of BART, computed in a method of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.xglm.modeling_xglm import XGLMAttention

from builder.common.errors import ExportError
from builder.graphs.export.attention import multi_head_attention, refuse_unknown
from builder.graphs.export.cached_attention import group_query_attention
from builder.graphs.export.caches import is_exporting


def attend(
    self: Any,
    hidden_states: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the self-attention of BART does, in an encoder or over a cache."""
    refuse_unknown(options)
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if past_key_values is None:
        output = multi_head_attention(query, key, value, self.scaling, attention_bias=attention_mask)
    elif not is_exporting():
        raise ExportError("its attention over a cache is fused in a decoder alone")
    else:
        key, value = past_key_values.update(key, value, self.layer_idx)
        output = group_query_attention(query, key, value, self.scaling)
    return self.out_proj(output.flatten(2)), None


REPLACED = (XGLMAttention, "forward", attend)

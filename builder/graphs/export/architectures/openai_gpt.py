"""GPT: no cache in transformers, which reads the whole text for each token; its layers do not know their number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import OpenAIGPTConfig
from transformers.models.openai.modeling_openai import Attention

from builder.graphs.export.attention import causal_attention
from builder.graphs.export.cached_attention import group_query_attention
from builder.graphs.export.caches import is_exporting, running_cache
from builder.runtime.contract import LayerShape


def layers(config: OpenAIGPTConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of each layer."""
    for _ in range(config.n_layer):
        yield LayerShape(config.n_head, config.n_embd // config.n_head)


def _attn(
    self: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    output_attentions: bool = False,
) -> list[torch.Tensor]:
    """Attend; key: (batch, heads, head size, sequence)."""
    key, scale = key.transpose(2, 3), value.shape[-1] ** -0.5 if self.scale else 1.0
    if not is_exporting():
        return [causal_attention(query, key, value, scale).transpose(1, 2)]
    running_cache().begin_next()
    return [group_query_attention(query, key, value, scale).transpose(1, 2)]


REPLACED = (Attention, "_attn", _attn)

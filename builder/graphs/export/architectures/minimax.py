"""MiniMax: a linear attention whose heads decay at constant rates (arXiv:2501.08313), in a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import MiniMaxConfig
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from builder.common.errors import ExportError
from builder.graphs.export.caches import ExportCache
from builder.graphs.export.states import decaying_attention
from builder.runtime.contract import LayerShape


def layers(config: MiniMaxConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of a layer, or its state: (heads, head size, head size)."""
    heads, size = config.num_attention_heads, config.head_dim or config.hidden_size // config.num_attention_heads
    for kind in config.layer_types:
        if kind == "linear_attention":
            yield LayerShape(0, 0, ((heads, size, size),))
        else:
            yield LayerShape(config.num_key_value_heads, size)


def _forward(
    self: MiniMaxLightningAttention,
    hidden_states: torch.Tensor,
    past_key_values: ExportCache | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if past_key_values is None:
        raise ExportError("its linear attention is fused in a decoder alone")
    past_key_values.get_recurrent_state(self.layer_idx)
    projected = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (self.num_attention_heads, -1))
    query, key, value = projected.split(self.head_dim, dim=3)
    decay = -self.slope_rate[:, 0, 0].expand(*query.shape[:3])
    output = self.norm(decaying_attention(query, key, value, decay).flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), None


REPLACED = (
    (MiniMaxLightningAttention, "forward", _forward),
    (modeling_minimax, "MiniMaxCache", ExportCache),
)

"""ZAYA: compressed convolutional attention (arXiv:2510.04476).

Two convolutions mix queries and keys, and half of each value is that of the token before. A text begins with zeros
before its first token, of which the first convolution makes its bias: it is added after the second one's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaCCAProjection

from builder.graphs.export.states import causal_convolution, previous_tokens
from builder.runtime.contract import LayerShape


def layers(config: ZayaConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of each layer, and the tokens before: for both convolutions, and of the values."""
    heads, size = config.num_key_value_heads, config.head_dim
    channels = (config.num_attention_heads + heads) * size
    states = ((config.cca_time0 - 1, channels), *((1, channels),) * (config.cca_time1 - 1), (1, heads * size // 2))
    for _ in range(config.num_hidden_layers):
        yield LayerShape(heads, size, states)


def _project(
    self: Any, hidden_states: torch.Tensor, past_key_values: Any, conv_mask: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    past_key_values.get_conv_state(self.layer_idx)
    query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
    mixed = self._convolve(torch.cat([query, key], dim=-1))
    query, key = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (query, key))
    query = (query + key.repeat_interleave(self.num_key_value_groups, dim=2)) * 0.5
    key = query.unflatten(2, (-1, self.num_key_value_groups)).mean(dim=3)
    delayed = self.v_proj_delayed
    before = previous_tokens(torch.nn.functional.linear(hidden_states, delayed.weight))
    before = before if delayed.bias is None else before + delayed.bias
    value = torch.cat([self.v_proj_current(hidden_states), before], dim=-1)
    value = value.reshape(*value.shape[:-1], -1, self.head_dim)
    return mixed[:, :, : query.shape[2]] + query, mixed[:, :, query.shape[2] :] + key, value


def _convolve(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return both convolutions of tokens (batch, sequence, channels): (batch, sequence, heads, head size)."""
    first, second = self.conv_qk_depthwise, self.conv_qk_grouped
    lagging = causal_convolution(tokens.transpose(1, 2), first.weight.squeeze(1)).transpose(1, 2)
    result = second.bias
    for lag in range(self.grouped_kernel_size):
        lagging = previous_tokens(lagging) if lag else lagging
        weight = second.weight[:, :, self.grouped_kernel_size - 1 - lag].unflatten(0, (-1, self.head_dim))
        heads = (lagging + first.bias).unflatten(-1, (-1, 1, self.head_dim))
        result = result + (heads @ weight.transpose(1, 2)).flatten(2)
    return result.unflatten(-1, (-1, self.head_dim))


REPLACED = (
    (ZayaCCAProjection, "forward", _project),
    (ZayaCCAProjection, "_convolve", _convolve),
)

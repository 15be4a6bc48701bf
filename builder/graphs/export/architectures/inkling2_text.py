"""Inkling 2: Inkling's bias by distance, sinks of each query, and convolutions with weights of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2DynamicShortConvolution, Inkling2RelativeLogits

from builder.graphs.export.architectures.inkling_text import bias_heads as bias_heads
from builder.graphs.export.architectures.inkling_text import by_distance
from builder.graphs.export.states import previous_tokens
from builder.runtime.contract import LayerShape


def layers(config: Inkling2TextConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of each layer, and the states of its four convolutions.

    Those of a convolution by token are its last tokens, each for itself.
    """
    before = config.conv_kernel_size - 1
    for kind in config.layer_types:
        if kind == "hybrid_sliding":
            heads, size = config.swa_num_key_value_heads, config.swa_head_dim
            own: tuple[tuple[int, ...], ...] = ((before, heads * size),) * 2
        else:
            heads, size = config.num_key_value_heads, config.head_dim
            own = ((1, heads * size),) * (2 * before)
        yield LayerShape(heads, size, (*own, *((before, config.hidden_size),) * 2))


def _convolve(
    self: Any,
    hidden_states: torch.Tensor,
    dynamic_input: torch.Tensor,
    past_key_values: Any = None,
    conv_mask: Any = None,
    **options: Any,
) -> torch.Tensor:
    past_key_values.get_conv_state(self.layer_idx)
    weights = self.weight_proj(dynamic_input).unflatten(-1, (self.num_heads, 1, self.conv_kernel_size))
    weights = weights + self.static_weight.T.unflatten(0, (self.num_heads, -1))
    token, total = hidden_states, hidden_states
    for lag in range(self.conv_kernel_size):
        token = previous_tokens(token) if lag else token
        heads = token.reshape(*token.shape[:-1], self.num_heads, -1)
        total = total + (heads * weights[..., lag]).flatten(2)
    return total / math.sqrt(2 * self.conv_kernel_size + 1)


REPLACED = (
    (Inkling2RelativeLogits, "forward", by_distance),
    (Inkling2DynamicShortConvolution, "forward", _convolve),
)

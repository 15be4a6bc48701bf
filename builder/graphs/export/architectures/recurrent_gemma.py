"""RecurrentGemma: real-gated linear recurrent units (RG-LRU, arXiv:2402.19427), whose states its modules keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
    RecurrentGemmaRglru,
)

from builder.graphs.export.caches import begin_next_states
from builder.graphs.export.states import causal_convolution, decaying_attention
from builder.runtime.contract import LayerShape


def layers(config: RecurrentGemmaConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of a layer, or the states of its convolution and of its recurrence."""
    for kind in config.layer_types:
        if kind == "linear_attention":
            yield LayerShape(0, 0, ((config.conv1d_width - 1, config.lru_width), (config.lru_width, 1, 1)))
        else:
            yield LayerShape(config.num_key_value_heads, config.head_dim)


def _forward(
    self: RecurrentGemmaRecurrentBlock,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    begin_next_states()
    gate = self.act_fn(self.linear_y(input_states))
    convolution = self.conv_1d
    mixed = causal_convolution(
        self.linear_x(input_states).transpose(1, 2), convolution.weight.squeeze(1), convolution.bias
    )
    return self.linear_out(self.rg_lru(mixed.transpose(1, 2), position_ids) * gate), None


def _scan(
    self: RecurrentGemmaRglru, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """Scan (batch, sequence, width): each channel is a head with one key, which is 1, and one value.

    A text begins with states of zeros, so the gate of its first token needs no reset.
    """
    ones = torch.ones_like(hidden_states[..., :1, None])
    scanned = decaying_attention(ones, ones, hidden_states[..., None], recurrent_gate.log())
    return scanned.squeeze(-1), None


REPLACED = (
    (RecurrentGemmaRecurrentBlock, "forward", _forward),
    (RecurrentGemmaRglru, "_rnn_scan", _scan),
)

"""RWKV-4 (arXiv:2305.13048): attention as a recurrence over sums of exponents, and tokens mixed with those before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import RwkvConfig
from transformers.models.rwkv.modeling_rwkv import RwkvFeedForward, RwkvSelfAttention

from builder.graphs.export.caches import begin_next_states
from builder.graphs.export.scans import scanned
from builder.graphs.export.states import previous_tokens
from builder.runtime.contract import LayerShape

NOTHING = -1e38  # exponent of the sums before a text's first token


def layers(config: RwkvConfig) -> Iterator[LayerShape]:
    """Yield the states of each layer: the token before, the sums and their exponent, the token before the units."""
    for _ in range(config.num_hidden_layers):
        yield LayerShape(0, 0, ((1, config.hidden_size), (3, config.attention_hidden_size), (1, config.hidden_size)))


def _attend(self: Any, hidden: torch.Tensor, state: Any = None, use_cache: bool = False) -> tuple[torch.Tensor, Any]:
    begin_next_states()
    before = previous_tokens(hidden)
    key, value, gate = (
        project(hidden * mix + before * (1 - mix))
        for project, mix in (
            (self.key, self.time_mix_key),
            (self.value, self.time_mix_value),
            (self.receptance, self.time_mix_receptance),
        )
    )
    decay = (-torch.exp(self.time_decay)).expand(key.shape)
    return self.output(torch.sigmoid(gate) * scanned(_sum, key, key + self.time_first, value, decay)), state


def _sum(
    state: torch.Tensor, key: torch.Tensor, first: torch.Tensor, value: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a token to sums (batch, 3, size): of weighted values, of weights, and the exponent of both.

    `first`: the exponent of the token in its own output. Returns the sums after it, and its output.
    """
    values, weights, exponent = state.unbind(1)
    exponent = torch.where(weights > 0, exponent, NOTHING)
    output = torch.maximum(exponent, first)
    past, new = (exponent - output).exp(), (first - output).exp()
    mean = (past * values + new * value) / (past * weights + new)
    after = torch.maximum(exponent + decay, key)
    past, new = (exponent + decay - after).exp(), (key - after).exp()
    return torch.stack([past * values + new * value, past * weights + new, after], dim=1), mean


def _feed_forward(self: Any, hidden: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
    before = previous_tokens(hidden)
    units, gate = (
        project(hidden * mix + before * (1 - mix))
        for project, mix in ((self.key, self.time_mix_key), (self.receptance, self.time_mix_receptance))
    )
    return torch.sigmoid(gate) * self.value(torch.relu(units).square()), state


REPLACED = (
    (RwkvSelfAttention, "forward", _attend),
    (RwkvFeedForward, "forward", _feed_forward),
)

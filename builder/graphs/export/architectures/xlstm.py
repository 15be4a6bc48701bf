"""xLSTM (arXiv:2405.04517): linear attention with exponential gates, whose exponents are relative to their largest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel, xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend, xLSTMModel, xLSTMOutput

from builder.common.replaced import replaced
from builder.graphs.export.caches import begin_next_states
from builder.graphs.export.scans import scanned
from builder.graphs.export.states import decaying_attention
from builder.runtime.contract import LayerShape


def layers(config: xLSTMConfig) -> Iterator[LayerShape]:
    """Yield the states of each layer: the largest exponent, and the keys' sum beside that of their values."""
    heads = config.num_heads
    for _ in range(config.num_hidden_layers):
        yield LayerShape(0, 0, ((heads,), (heads, config.qk_head_dim, config.v_head_dim + 1)))


def prepared(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run without the pieces in which transformers computes a long text."""
    return replaced((model.config, "max_inference_chunksize", sys.maxsize))


def _forward(self: Any, input_ids: torch.Tensor, **options: Any) -> xLSTMOutput:
    hidden = self.embeddings(input_ids)
    for block in self.blocks:
        hidden, _ = block(hidden)
    return xLSTMOutput(last_hidden_state=self.out_norm(hidden))


def _attend(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; query, key, value: (batch, heads, sequence, size); igate, fgate: (batch, heads, sequence)."""
    begin_next_states()
    query, key, value, entering, keeping = (
        tensor.transpose(1, 2) for tensor in (query, key, value, igate, torch.nn.functional.logsigmoid(fgate))
    )
    largest, before = scanned(_largest, entering, keeping).unbind(2)
    key = key * (entering - largest).exp()[..., None]
    value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
    read = decaying_attention(query * query.shape[-1] ** -0.5, key, value, keeping + before - largest)
    weights = torch.maximum(read[..., -1:].abs(), (-largest).exp()[..., None])
    return (read[..., :-1] / (weights + self.config.eps)).transpose(1, 2), None


def _largest(before: torch.Tensor, entering: torch.Tensor, keeping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest exponent after a token, (batch, heads), and beside the one before it."""
    largest = torch.maximum(before + keeping, entering)
    return largest, torch.stack([largest, before], dim=1)


REPLACED = (
    (xLSTMModel, "forward", _forward),
    (xLSTMBackend, "forward", _attend),
)

"""DBRX: experts side by side as one matrix, in a class of their own; every expert runs for every token."""

from __future__ import annotations

import torch
from torch.nn.functional import linear
from transformers.models.dbrx.modeling_dbrx import DbrxExperts

from builder.graphs.export.experts import expert_weights


def _forward(
    self: DbrxExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute (batch, sequence, hidden); top_k_index, top_k_weights: (tokens, chosen)."""
    glu, tokens = self.mlp, hidden_states.reshape(-1, self.hidden_size)
    units = glu.activation_fn(linear(tokens, glu.w1)) * linear(tokens, glu.v1)
    weights = expert_weights(top_k_index, top_k_weights, self.num_experts)
    weighted = units.unflatten(-1, (self.num_experts, -1)) * weights[..., None]
    return (weighted.flatten(1) @ glu.w2).reshape(hidden_states.shape)


REPLACED = (DbrxExperts, "forward", _forward)

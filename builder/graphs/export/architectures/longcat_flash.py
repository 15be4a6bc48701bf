"""LongCat-Flash: behind the experts with weights, a router has some that return a token as it is (arXiv:2509.01322).

transformers does not dispatch its experts as it does those of other architectures. Here a module beside them, which
shares their weights, is dispatched so; it has no expert for the indices of those without weights, which count nothing
there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from builder.graphs.export.sparse_experts import compute_sparse_experts

ROUTED = "routed"  # name of the module beside the experts


class RoutedExperts(torch.nn.Module):
    """Experts with weights of `layer`, as transformers' interface of experts has them."""

    has_gate = is_concatenated = True
    has_bias = is_transposed = has_post_expert_norm = _is_expert_parallel = False

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.num_experts = layer.num_routed_experts
        self.act_fn = copy.deepcopy(layer.act_fn)  # torch.export gives modules other identities if one has two names
        self.gate_up_proj = torch.nn.Parameter(layer.gate_up_proj.detach()[: self.num_experts], requires_grad=False)
        self.down_proj = torch.nn.Parameter(layer.down_proj.detach(), requires_grad=False)

    def _apply_gate(self, units: torch.Tensor) -> torch.Tensor:
        gate, up = units.chunk(2, dim=-1)
        result: torch.Tensor = self.act_fn(gate) * up
        return result

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return compute_sparse_experts(self, hidden, indices, weights)


@contextmanager
def prepared(model: PreTrainedModel) -> Iterator[None]:
    """Run with a module of `RoutedExperts` in each layer of experts."""
    layers = [module for module in model.modules() if isinstance(module, LongcatFlashExperts)]
    try:
        for layer in layers:
            layer.add_module(ROUTED, RoutedExperts(layer))
        yield
    finally:
        for layer in layers:
            layer._modules.pop(ROUTED, None)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    kept = (top_k_weights * (top_k_index >= self.num_routed_experts)).sum(dim=-1, keepdim=True)
    result: torch.Tensor = getattr(self, ROUTED)(hidden_states, top_k_index, top_k_weights)
    return result + hidden_states * kept


REPLACED = (LongcatFlashExperts, "forward", _forward)

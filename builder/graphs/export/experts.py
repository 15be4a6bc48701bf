"""Dense mixtures of experts: every expert runs for every token, as two products a layer.

The experts stand side by side as one matrix, (experts * units, hidden), as quantisation needs them too, and those that
a token was not routed to get the weight 0. This computes experts / chosen experts times as much as a sparse layer, and
reads all weights at each step. It is for layers that sparse_experts.py cannot express. Knows tensors; knows no
architecture.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from builder.common.errors import ExportError
from builder.graphs.onnx.operators import SPARSE_EXPERTS

PARTS = ("side_by_side_up", "side_by_side_down")
DISPATCHED = "_is_expert_parallel"  # attribute of experts that transformers dispatches to a function by its name
ROUTED = {"top_k_index", "top_k_weights"}  # parameters of the forward method of transformers' experts
IDENTITY = "identity_expert"  # of experts, some of which return a token as it is; it does not dispatch those


def cost_of_experts(model: PreTrainedModel, operators: Counter[str]) -> str | None:
    """Return a remark on the dense mixtures of experts in a graph with these `operators`; None if there are none."""
    layers = [module for module in model.modules() if _is_mixture(module)]
    sparse = sum(operators[name] for name in SPARSE_EXPERTS)
    if sparse >= len(layers):
        return None
    experts = max(
        int(layer.down_proj.shape[0] if hasattr(layer, "down_proj") else layer.num_experts) for layer in layers
    )
    return (
        f"{len(layers) - sparse} of {len(layers)} mixtures of experts run all of their {experts} experts for every "
        "token, where PyTorch runs those that the router chose: right, but slower, and all their weights are read at "
        "each step"
    )


def _is_mixture(module: Any) -> bool:
    """Return True for experts that transformers dispatches, some of which may be the identity, or calls so (DBRX)."""
    known = hasattr(module, DISPATCHED) or hasattr(module, IDENTITY)
    return known or ROUTED.issubset(inspect.signature(module.forward).parameters)


def expert_layers(model: PreTrainedModel) -> list[Any]:
    """Return the modules that transformers' `use_experts_implementation` decorates."""
    return [module for module in model.modules() if hasattr(module, DISPATCHED)]


def expert_weights(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the weight of each expert, (tokens, experts), 0 for those not chosen.

    An index beyond the experts, which some routers use for none, is ignored.
    """
    chosen = top_k_index[..., None] == torch.arange(experts)
    return (chosen * top_k_weights[..., None]).sum(dim=1)


def put_side_by_side(layer: Any) -> None:
    """Give `layer` its weights as matrices of two axes, (outputs, inputs)."""
    if layer.has_post_expert_norm:
        raise ExportError("its experts end in a normalisation of their own, which a sum over all of them cannot have")
    up = layer.gate_up_proj if layer.has_gate else layer.up_proj
    down = layer.down_proj
    if layer.is_transposed:  # (experts, inputs, outputs)
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    matrices = (up.flatten(0, 1), down.transpose(0, 1).flatten(1))
    for name, matrix in zip(PARTS, matrices, strict=True):
        layer.register_parameter(name, torch.nn.Parameter(matrix.detach().contiguous(), requires_grad=False))


def compute_dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute transformers' experts function: hidden_states (tokens, hidden), the others (tokens, chosen)."""
    weights = expert_weights(top_k_index, top_k_weights, self.num_experts).to(hidden_states.dtype)
    units = linear(hidden_states, self.side_by_side_up).reshape(
        -1, self.num_experts, self.side_by_side_up.shape[0] // self.num_experts
    )
    if self.has_bias:
        units = units + (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias)
    units = self._apply_gate(units) if self.has_gate else self.act_fn(units)  # (tokens, experts, units)
    result = linear((units * weights[..., None]).flatten(1), self.side_by_side_down)
    return result + weights @ self.down_proj_bias if self.has_bias else result

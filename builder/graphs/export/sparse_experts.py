"""Sparse mixtures of experts: one operator a layer, which reads the weights of the chosen experts alone.

Operator: com.microsoft MoE, as in ONNX Runtime's ContribOperators.md. It takes the experts with the highest logits and
weights them by the softmax of all logits. transformers has routed before, each architecture in its own way: logarithms
of the router's weights make the operator choose the same experts, and the weights' sum restores what its softmax
divides by. Its weights stay as the model stores them; builder/graphs/onnx/experts.py gives them the operator's order.

A layer whose activation the operator does not have is dense (experts.py). transformers looks these functions up by name
(ExpertsInterface), as it does attention. Knows tensors; knows no architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from builder.graphs.export.experts import PARTS, compute_dense_experts, expert_layers, expert_weights, put_side_by_side
from builder.graphs.onnx.experts import STORED, TRANSPOSED

IMPLEMENTATION = "sparse_experts"
UNCHOSEN = 1e-37  # weight of an expert that was not chosen; its logarithm is finite
PROBE = 16.0  # activations are compared from -PROBE to PROBE at least, and past every number of the layer
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "gelu": lambda values: torch.nn.functional.gelu(values, approximate="tanh"),
    "identity": lambda values: values,
}

Attributes = dict[str, Any]

_attributes: dict[Any, Attributes] = {}  # of the operator, by the layer that is exported


@contextmanager
def sparse_experts(model: PreTrainedModel) -> Iterator[None]:
    """Run with each layer of experts as one MoE, or as a dense layer if the operator cannot compute it."""
    layers, before = expert_layers(model), model.get_experts_implementation()
    try:
        for layer in layers:
            attributes = activation_of(layer)
            if attributes is None:
                put_side_by_side(layer)
            else:
                _attributes[layer] = attributes
        if layers:
            model.set_experts_implementation(IMPLEMENTATION)
        yield
    finally:
        if layers:
            model.set_experts_implementation(before)
        for layer in layers:
            for name in PARTS:
                layer._parameters.pop(name, None)
        _attributes.clear()


def activation_of(layer: Any) -> Attributes | None:
    """Return the operator's attributes that compute the activation of `layer`; None if there are none.

    Found by comparing values, because transformers has no name for what an architecture does between its products.
    """
    if layer.has_post_expert_norm:
        return None
    reach = 2 * max([PROBE, *(abs(value) for value in _numbers(layer).values() if math.isfinite(value))])
    numbers = torch.linspace(-reach, reach, 65)
    gate, up = numbers[:, None].expand(-1, len(numbers)), numbers.expand(len(numbers), -1)
    if not layer.has_gate:
        found = (name for name, function in PLAIN.items() if _equal(layer.act_fn(gate), function(gate)))
        name = next(found, None)
        return None if name is None else {"activation_type": name}
    side_by_side = layer.is_concatenated
    together = torch.cat([gate, up], dim=-1) if side_by_side else torch.stack([gate, up], dim=-1).flatten(-2)
    actual = layer._apply_gate(together)
    for alpha, beta, limit in _settings(layer):
        low, high = up.clamp(-limit, limit), gate.clamp(max=limit)
        if _equal(actual, high * torch.sigmoid(alpha * high) * (low + beta)):
            attributes = {"activation_alpha": alpha, "activation_beta": beta}
            return {
                "activation_type": "swiglu",
                "swiglu_fusion": 1,
                **attributes,
                **({} if math.isinf(limit) else {"swiglu_limit": limit}),
            }
    return None


def _settings(layer: Any) -> Iterator[tuple[float, float, float]]:
    """Yield alpha, beta and limit of SwiGLU as `layer` may mean them: its own numbers, and those of plain SiLU."""
    alphas = [1.0, *(value for name, value in _numbers(layer).items() if "alpha" in name)]
    limits = [math.inf, *(value for name, value in _numbers(layer).items() if "limit" in name)]
    for alpha in alphas:
        for limit in limits:
            yield alpha, 0.0, limit
            yield alpha, 1.0, limit


def _numbers(layer: Any) -> dict[str, float]:
    """Return the numbers that an activation of `layer` may have, by their names: a limit or a factor."""
    return {
        name: float(value)
        for name, value in vars(layer).items()
        if isinstance(value, float) or (isinstance(value, int) and "limit" in name)
    }


def _equal(values: torch.Tensor, others: torch.Tensor) -> bool:
    return bool(torch.allclose(values, others, rtol=1e-5, atol=1e-6))


def compute_sparse_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute transformers' experts function: hidden_states (tokens, hidden), the others (tokens, chosen)."""
    attributes = _attributes.get(self)
    if attributes is None:
        return compute_dense_experts(self, hidden_states, top_k_index, top_k_weights)
    weights = expert_weights(top_k_index, top_k_weights, self.num_experts)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    biases = [getattr(self, f"{name}_bias"), self.down_proj_bias] if self.has_bias else [None, None]
    result = torch.onnx.ops.symbolic(
        "com.microsoft::MoE",
        [
            hidden_states,
            weights.clamp(min=UNCHOSEN).log(),
            getattr(self, name),
            biases[0],
            self.down_proj,
            biases[1],
        ],
        attrs={
            **attributes,
            "k": int(top_k_index.shape[-1]),
            STORED: "side by side" if self.has_gate and self.is_concatenated else "as the operator",
            TRANSPOSED: int(self.is_transposed),
        },
        dtype=hidden_states.dtype,
        shape=hidden_states.shape,
        version=1,
    )
    return result * weights.sum(dim=-1, keepdim=True)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_sparse_experts)

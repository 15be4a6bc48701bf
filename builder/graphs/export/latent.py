"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a cache of the latents that all heads share.

transformers caches a token's latent and its rotated key, and expands the latents of all tokens to keys and values of
each head at every call (`expand_kv`). Expanding is a product with a constant matrix, so queries can take it instead
("absorbed"): a head's scores are products of its query, brought into the space of latents, with the latents, and its
output is a mean of latents, brought back. All heads then share one key head, the latent beside the rotated key, which
is its value too. Where that would take more memory than the keys and values of all heads, those are cached.

Knows tensors and the names that transformers gives the parts; knows no architecture and no task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from builder.common.replaced import replaced
from builder.runtime.contract import LayerShape

EXPAND = "expand_kv"  # the method that expands latents; transformers has it wherever a cache holds them
PARTS = ("latent_key", "latent_value")


def latent_layers(model: PreTrainedModel) -> dict[int, Any]:
    """Return the attentions whose cache in transformers holds latents, by their layer of the cache."""
    return {int(module.layer_idx): module for module in model.modules() if hasattr(module, EXPAND)}


def latent_shape(module: Any) -> LayerShape:
    """Return what the fused attention of `module` caches: latents, or each head's keys and values if those are less.

    The operators take keys and values of one size.
    """
    expanded = LayerShape(module.num_heads, max(module.qk_head_dim, module.v_head_dim))
    return min(expanded, _latents(module), key=lambda shape: shape.heads * shape.size)


def _latents(module: Any) -> LayerShape:
    return LayerShape(1, module.kv_lora_rank + module.qk_rope_head_dim)


@contextmanager
def absorbed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run with attentions over latents, where those are kept."""
    modules = [module for module in latent_layers(model).values() if latent_shape(module) == _latents(module)]
    try:
        for module in modules:
            _split_expansion(module)
        with replaced(*((kind, EXPAND, _keep_latents) for kind in {type(module) for module in modules})):
            yield
    finally:
        for module in modules:
            for name in PARTS:
                module._parameters.pop(name, None)


def is_absorbed(module: Any) -> bool:
    """Return True if `module` hands latents to its attention function, in place of keys and values."""
    return PARTS[0] in module._parameters


def to_latents(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Return queries (batch, heads, sequence, head size) in the space of latents, (..., rank + rotated size)."""
    plain, rotated = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    return torch.cat((_by_head(plain, module.latent_key), rotated), dim=-1)


def from_latents(module: Any, output: torch.Tensor) -> torch.Tensor:
    """Return means of latents, (batch, sequence, heads, rank and more), as values of (..., value size)."""
    return _by_head(output[..., : module.kv_lora_rank].transpose(1, 2), module.latent_value).transpose(1, 2)


def _by_head(tensor: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply (batch, heads, sequence, inputs) by (heads, inputs, outputs): one product a head, of all rows."""
    batch, heads, sequence, size = tensor.shape
    product = tensor.transpose(0, 1).reshape(heads, batch * sequence, size) @ matrices
    return product.reshape(heads, batch, sequence, matrices.shape[-1]).transpose(0, 1)


def _split_expansion(module: Any) -> None:
    """Give `module` a matrix for each head: to latents, (heads, size, rank), and back, (heads, rank, value size)."""
    expansion = module.kv_b_proj.weight.detach().unflatten(0, (module.num_heads, -1))
    keys, values = expansion.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    for name, matrices in zip(PARTS, (keys, values.transpose(1, 2)), strict=True):
        module.register_parameter(name, torch.nn.Parameter(matrices.contiguous(), requires_grad=False))


def _keep_latents(self: Any, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the place of `expand_kv`: return (batch, 1, sequence, rank + rotated size) as keys and as values."""
    shared = torch.cat((latents, rotated), dim=-1)
    return shared, shared

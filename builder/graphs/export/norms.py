"""Write RMSNorm (arXiv:1910.07467) in the form that every engine fuses into one operator.

Architectures write it in their own ways (a power of -0.5, no weight, heads before tokens), of which ONNX Runtime leaves
several as six operators. A module is replaced only if it computes the norm, on random tensors. The operators are
standard ones, since OpenVINO and TensorRT read the exported graph too: ONNX Runtime makes them
SimplifiedLayerNormalization, OpenVINO RMS.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from builder.common.replaced import replaced

WEIGHT = "weight"
ANY_SIZE = 8  # of the features that a norm without a weight is tried on
SCALES = (1.0, 1e-2, 1e-3)  # of rows: in small ones the usual epsilons, of 1e-5 and 1e-6, count


@dataclass(frozen=True)
class Norm:
    """Compute what a module does: x / sqrt(mean(x^2) + epsilon) * (weight + offset), over the last axis."""

    epsilon: float
    offset: float

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        real = hidden.float()
        root = torch.sqrt(real.pow(2).mean(-1, keepdim=True) + self.epsilon)
        gain = weight.float() + self.offset if self.offset else weight.float()
        return (real / root * gain).to(hidden.dtype)


def recognisable_norms(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Run with each RMSNorm of `model` in the form that engines fuse."""
    found = ((module, _norm_of(module)) for module in model.modules())
    return replaced(*((one, "forward", partial(_forward, norm, one)) for one, norm in found if norm is not None))


def _norm_of(module: torch.nn.Module) -> Norm | None:
    """Return the norm that `module` computes; None if it computes something else."""
    weights = dict(module.named_parameters())
    others = [*module.children(), *module.buffers()]
    if others or not set(weights) <= {WEIGHT} or any(weight.dim() != 1 for weight in weights.values()):
        return None
    epsilons = [value for value in vars(module).values() if isinstance(value, float)]
    if not epsilons or len(inspect.signature(module.forward).parameters) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    size = len(weights[WEIGHT]) if weights else ANY_SIZE
    rows = torch.randn((2, len(SCALES), size), generator=generator) * torch.tensor(SCALES)[:, None]
    tried = torch.randn(size, generator=generator) if weights else torch.ones(size)
    try:
        actual = torch.func.functional_call(module, dict.fromkeys(weights, tried), (rows,))
    except Exception:  # it takes other tensors: not a norm
        return None
    for norm in (Norm(epsilon, offset) for epsilon in epsilons for offset in (0.0, 1.0)):
        expected = norm(rows, tried)
        if isinstance(actual, torch.Tensor) and actual.shape == rows.shape and torch.allclose(actual, expected, 1e-4):
            return norm
    return None


def _forward(norm: Norm, module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    own = module._parameters.get(WEIGHT)
    # ONNX Runtime's operator has a weight.
    weight: torch.Tensor = torch.full((int(hidden.shape[-1]),), 1.0) if own is None else own
    if not _has_heads_first(hidden):
        return norm(hidden, weight)
    # ONNX Runtime moves transpositions behind a norm, whose axis it then no longer knows to be the last.
    return norm(hidden.transpose(1, 2), weight).transpose(1, 2)


def _has_heads_first(hidden: torch.Tensor) -> bool:
    """Return True for (batch, heads, tokens, size) whose memory has the tokens before the heads."""
    return hidden.dim() == 4 and bool(hidden.shape[1] == 1 or hidden.stride(1) < hidden.stride(2))

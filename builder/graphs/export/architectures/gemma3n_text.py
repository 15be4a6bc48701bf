"""Gemma 3n: its first layers keep a share of the activations, whose quantile is a number and needs no operator."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP


def _largest(self: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return what exceeds the quantile `activation_sparsity` of a normal distribution, and 0 for the rest."""
    multiplier = NormalDist().inv_cdf(self.activation_sparsity)
    mean = inputs.mean(dim=-1, keepdim=True)
    deviation = (inputs - mean).pow(2).mean(dim=-1, keepdim=True).sqrt()
    return torch.nn.functional.relu(inputs - (mean + deviation * multiplier))


REPLACED = (Gemma3nTextMLP, "_gaussian_topk", _largest)

"""umT5: as T5, with a bias of its own in each layer (arXiv:2304.09151)."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from builder.graphs.export.architectures.t5 import bias_by_row


def _buckets(attention: Any, distances: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = attention._relative_position_bucket(-distances)
    return found


REPLACED = bias_by_row(UMT5Attention, _buckets)

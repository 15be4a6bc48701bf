"""umT5: as T5, with a bias of its own in each layer (arXiv:2304.09151)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from builder.graphs.export.architectures.t5 import with_bias_by_row


def fused(model: PreTrainedModel) -> AbstractContextManager[None]:
    return with_bias_by_row(UMT5Attention, _buckets)


def _buckets(attention: Any, distances: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = attention._relative_position_bucket(-distances)
    return found

"""T5 and FLAN-T5: a bias by the bucketed distance of key and query (arXiv:1910.10683), computed once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.t5.modeling_t5 import T5Attention

from builder.graphs.export.caches import is_exporting, running_cache

Buckets = Callable[[Any, torch.Tensor], torch.Tensor]


def buckets(attention: Any, distances: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance from a query back to a key, by the architecture's own function."""
    found: torch.Tensor = attention._relative_position_bucket(
        -distances,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return found


def bias_by_row(attention: Any, of: Buckets = buckets) -> tuple[Any, str, Callable[..., torch.Tensor]]:
    """Return the replacement of the bias of `attention`: in a decoder over caches, each row has its own position."""
    compute_bias = attention.compute_bias

    def bias(self: Any, query_length: Any, key_length: Any, **options: Any) -> torch.Tensor:
        if not self.is_decoder or not is_exporting():
            own: torch.Tensor = compute_bias(self, query_length, key_length, **options)
            return own
        cache = running_cache()
        assert cache.positions is not None
        furthest = self.relative_attention_max_distance  # beyond it there is one bucket
        table = self.relative_attention_bias(of(self, torch.arange(furthest + 1)))  # (distances, heads)
        total: Any = cache.total.item()
        torch._check(total >= 0)  # type: ignore[no-untyped-call]
        distances = (cache.positions[:, :, None] - torch.arange(total)).clamp(0, furthest)
        values: torch.Tensor = table[distances].permute(0, 3, 1, 2)  # (rows, heads, 1, total)
        return values

    return attention, "compute_bias", bias


REPLACED = bias_by_row(T5Attention)

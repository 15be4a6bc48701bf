"""Decoder attention fused at export: the cache goes in and comes out as tensors of one shape, updated in place.

Operator: com.microsoft GroupQueryAttention, as in ONNX Runtime's ContribOperators.md. The cache that is handed to
transformers keeps nothing: it tells the attention function which layer runs, and that function emits the operator
with this layer's past and present. Knows tensors; knows no architecture and no task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from builder.errors import ExportError
from builder.export.attention import merge_heads

CACHED = "onnxruntime_group_query_attention"
# Arguments of an attention function that change scores, and that the operator has no input for.
UNSUPPORTED = ("position_bias", "head_mask", "s_aux")


class ExportCache(Cache):  # type: ignore[misc]
    """transformers' Cache as a pass-through: layer i's past tensors in, its present tensors kept for the outputs."""

    def __init__(self, past: Sequence[torch.Tensor], seqlens_k: torch.Tensor, total: torch.Tensor) -> None:
        self.layers: list[Any] = []
        self.past = list(past)
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seqlens_k = seqlens_k
        self.total = total
        self.layer: int | None = None
        self.bias: torch.Tensor | None = None
        self.rotations: dict[int, tuple[torch.Tensor, ...]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layer = layer
        return key, value

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """present_key_0, present_value_0, present_key_1, ..."""
        layers = len(self.past) // 2
        missing = [layer for layer in range(layers) if layer not in self.present]
        if missing:
            raise ExportError(f"layer {missing[0]} of {layers} has an attention that does not use the cache")
        return tuple(tensor for layer in range(layers) for tensor in self.present[layer])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        return query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * (len(self.past) // 2)

    @property
    def is_initialized(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.past) // 2


_running: ContextVar[ExportCache] = ContextVar("running")


@contextmanager
def exporting(cache: ExportCache) -> Iterator[None]:
    """Attention functions called inside write to `cache`."""
    token = _running.set(cache)
    try:
        yield
    finally:
        _running.reset(token)


def running_cache() -> ExportCache:
    """The cache of the forward that runs now."""
    return _running.get()


def group_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    attention_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Emit one GroupQueryAttention node over the running layer's cache: causal, each row at its own length.

    query: (batch, heads, sequence, head size); key, value: (batch, key heads, sequence, head size), new tokens
    only; `window`: how many of the last keys count, the query's own included; attention_bias: (batch or 1, heads
    or 1, sequence, total length), added to the scores.
    Returns (batch, sequence, heads, head size).
    """
    cache = running_cache()
    if cache.layer is None:
        raise ExportError("this attention does not update the cache before it runs")
    batch, heads, sequence, size = query.shape
    if key.shape[-1] != value.shape[-1]:
        raise ExportError(f"keys of size {key.shape[-1]} with values of size {value.shape[-1]} have no fused operator")
    past_key, past_value = cache.past[2 * cache.layer : 2 * cache.layer + 2]
    attributes: dict[str, Any] = {"num_heads": int(heads), "kv_num_heads": int(key.shape[1]), "scale": float(scale)}
    if window is not None:
        attributes["local_window_size"] = int(window)
    if softcap is not None:
        attributes["softcap"] = float(softcap)
    optional = [] if attention_bias is None else [None, None, None, attention_bias]  # rotary inputs come first
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [
            *(merge_heads(tensor) for tensor in (query, key, value)),
            past_key,
            past_value,
            cache.seqlens_k,
            cache.total,
            *optional,
        ],
        attrs=attributes,
        dtypes=[query.dtype, past_key.dtype, past_value.dtype],
        shapes=[(batch, sequence, heads * size), past_key.shape, past_value.shape],
        version=1,
    )
    cache.present[cache.layer] = (present_key, present_value)
    cache.layer = None
    return output.reshape(batch, sequence, heads, size)


def position_bias(of: Callable[[torch.Tensor], torch.Tensor], sequence: Any) -> torch.Tensor:
    """A bias by the key's position alone, made once for all layers: (1, heads, sequence, total length).

    `of` takes positions (total length,) float32 and gives (heads, total length).
    """
    cache = running_cache()
    if cache.bias is None:
        total: Any = cache.total.item()
        torch._check(total >= 0)  # type: ignore[no-untyped-call]
        values = of(torch.arange(total, dtype=torch.float32))
        cache.bias = values[None, :, None, :].expand(1, values.shape[0], sequence, total)
    return cache.bias


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; causality and windows are the operator's, so there is no mask."""
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ExportError(f"attention with {name} has no fused operator")
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    return group_query_attention(query, key, value, scale, sliding_window, softcap), None


def _no_mask(**options: Any) -> None:
    return None


AttentionInterface.register(CACHED, _attention)
AttentionMaskInterface.register(CACHED, _no_mask)

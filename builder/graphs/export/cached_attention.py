"""Decoder attention fused at export, over caches that come in and go out as tensors of one shape.

Operator: com.microsoft GroupQueryAttention, as in ONNX Runtime's ContribOperators.md, which updates them in place. It
gets the past of the layer that runs (caches.py), and its present becomes an output of the graph. Knows tensors; knows
no architecture and no task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import AttentionInterface, AttentionMaskInterface

from builder.common.errors import ExportError
from builder.graphs.export.attention import merge_heads, refuse_unknown
from builder.graphs.export.caches import CrossCache, running_cache
from builder.graphs.export.latent import from_latents, is_absorbed, to_latents
from builder.graphs.export.masks import describe, unchanged

CACHED = "onnxruntime_group_query_attention"
HIDDEN = -1e30  # added to the score of a key that does not count; finite, for sums of blocks without any that does


def group_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    attention_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Emit one GroupQueryAttention node over the running layer's cache: causal, each row at its own length.

    query: (batch, heads, sequence, head size); key: (batch, key heads, sequence, head size); value: (batch, key heads,
    sequence, value size); new tokens only. The operator takes one size: the smaller ones get zeros at their end.
    `window`: how many of the last keys count, the query's own included; attention_bias: (batch or 1, heads or 1,
    sequence, total length), added to the scores; sinks: (heads,), a score of each head's softmax that goes to no value.
    A layer that attends to another's keys and values reads what is present in that one's cache, and appends nothing.
    Returns (batch, sequence, heads, value size).
    """
    cache = running_cache()
    is_owner = cache.layer is not None
    layer = cache.layer if is_owner else cache.owner_of(key, value)
    if layer is None:
        raise ExportError("this attention does not update the cache before it runs")
    past = cache.past[2 * layer : 2 * layer + 2] if is_owner else cache.present[layer]
    batch, heads, sequence, _ = query.shape
    size, value_size = int(past[0].shape[3]), int(value.shape[-1])
    if int(key.shape[1]) != int(past[0].shape[1]):
        raise ExportError(
            f"its attention has {key.shape[1]} key heads where its cache has {past[0].shape[1]}: what it repeats by "
            "itself has no fused operator"
        )
    attributes: dict[str, Any] = {"num_heads": int(heads), "kv_num_heads": int(key.shape[1]), "scale": float(scale)}
    if window is not None:
        attributes["local_window_size"] = int(window)
    if softcap is not None:
        attributes["softcap"] = float(softcap)
    optional = [None, None, None, attention_bias, sinks]  # rotary inputs come first
    while optional and optional[-1] is None:
        optional.pop()
    appended = [query.new_zeros((batch, 0, int(key.shape[1]) * size))] * 2
    if is_owner:
        appended = [merge_heads(_widened(tensor, size)) for tensor in (key, value)]
    updated = past if is_owner else ()
    output, *present = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [
            merge_heads(_widened(query, size)),
            *appended,
            *past,
            cache.seqlens_k,
            cache.total,
            *optional,
        ],
        attrs=attributes,
        dtypes=[query.dtype, *(tensor.dtype for tensor in updated)],
        shapes=[(batch, sequence, heads * size), *(tensor.shape for tensor in updated)],
        version=1,
    )
    if is_owner:
        cache.present[layer] = (present[0], present[1])
    cache.layer = None
    output = output.reshape(batch, sequence, heads, size)
    return output if value_size == size else output[..., :value_size]


def _widened(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return `tensor` with zeros at the end of its last axis, up to `size`."""
    missing = size - int(tensor.shape[-1])
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def cross_attention(query: torch.Tensor, scale: float, cache: CrossCache) -> torch.Tensor:
    """Emit one GroupQueryAttention node over an encoder's keys and values, in place and unchanged.

    The beams of one text are the query heads of one row: each key head has as many as the maximum number of beams. The
    operator appends one token to the cache; it is given the text's last token again, so nothing changes.
    query: (rows, heads, 1, head size). Returns (rows, 1, heads, head size).
    """
    assert cache.layer is not None
    index, cache.layer = cache.layer, None
    past_key, past_value = cache.layers[index].past
    rows, heads, _, size = query.shape
    places, beams = cache.rows.shape
    if int(past_key.shape[1]) != int(heads):
        raise ExportError(f"a cross-attention of {heads} heads over {past_key.shape[1]} key heads is not supported")
    gathered = query.reshape(rows, heads, size).index_select(0, cache.rows.reshape(-1))
    if beams > 1:
        gathered = gathered.reshape(places, beams, heads, size).transpose(1, 2)
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [
            gathered.reshape(places, 1, heads * beams * size),
            cache.last[2 * index],
            cache.last[2 * index + 1],
            past_key,
            past_value,
            cache.seqlens_k,
            cache.total,
        ],
        attrs={"num_heads": int(heads) * int(beams), "kv_num_heads": int(heads), "scale": float(scale)},
        dtypes=[query.dtype, past_key.dtype, past_value.dtype],
        shapes=[(places, 1, heads * beams * size), past_key.shape, past_value.shape],
        version=1,
    )
    cache.present[index] = (present_key, present_value)
    if beams > 1:
        output = output.reshape(places, heads, beams, size).transpose(1, 2)
    return output.reshape(places * beams, heads * size).index_select(0, cache.places).reshape(rows, 1, heads, size)


def position_bias(of: Callable[[torch.Tensor], torch.Tensor], sequence: Any) -> torch.Tensor:
    """Return a bias by the key's position alone, computed once for all layers: (1, heads, sequence, total length).

    `of` takes positions (total length,) float32 and gives (heads, total length).
    """
    cache = running_cache()
    if cache.bias is None:
        total = _total_length()
        values = of(torch.arange(total, dtype=torch.float32))
        cache.bias = values[None, :, None, :].expand(1, values.shape[0], sequence, total)
    return cache.bias


def chunk_bias(size: int) -> torch.Tensor:
    """Return a bias that hides the chunks of `size` tokens before each query's own: (batch, 1, sequence, total length).

    It is computed once for all layers, whose chunks have one size.
    """
    cache = running_cache()
    if cache.bias is None:
        positions = token_positions()
        begins = positions - positions % size
        cache.bias = torch.where(torch.arange(_total_length()) < begins[:, None, :, None], HIDDEN, 0.0)
    return cache.bias


def key_distances() -> torch.Tensor:
    """Return how many tokens each key is before each query, (batch, sequence, total length); negative after it."""
    return token_positions()[..., None] - torch.arange(_total_length())


def token_positions() -> torch.Tensor:
    """Return the positions of the new tokens, (batch, sequence). Raises ExportError where a graph has none."""
    positions = running_cache().token_positions
    if positions is None:
        raise ExportError("attention by the positions of tokens is fused in decoders alone")
    return positions


def _total_length() -> Any:
    total: Any = running_cache().total.item()
    torch._check(total >= 0)  # type: ignore[no-untyped-call]
    return total


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as a function of transformers. The window is the mask's.

    `s_aux` are the sinks of heads, `sinks` those of each query: (batch, heads, sequence, 1), beside a bias on
    positions. Flash attention reads `sliding_window`; the attentions that transformers answers with here do not.
    """
    refuse_unknown(options)
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    cache = running_cache()
    if cache.cross is not None and cache.cross.layer is not None:
        if softcap is not None or s_aux is not None:
            raise ExportError("cross-attention with soft-capping or sinks has no fused operator")
        # T5 gives its cross-attention a position bias of zeros
        return cross_attention(query, scale, cache.cross), None
    if position_bias is not None and statically_known_true(position_bias.shape[-1] == key.shape[2]):
        raise ExportError(
            "its bias on positions is for the new tokens alone: it counts by the length of the cache, in which the "
            "rows of a batch differ"
        )
    if sinks is not None:
        if position_bias is None:
            raise ExportError("sinks of each query have a fused operator beside a bias on positions alone")
        # a softmax of scores that all differ by one number is the same: those sinks are 0 then
        position_bias, s_aux = position_bias - sinks, sinks.new_zeros(query.shape[1])
    mask = unchanged(attention_mask, cache.layer)
    if mask.chunk is not None:
        if position_bias is not None:
            raise ExportError("attention in chunks with a bias on positions has no fused operator")
        position_bias = chunk_bias(mask.chunk)
    absorbed = is_absorbed(module)
    query = to_latents(module, query) if absorbed else query
    output = group_query_attention(query, key, value, scale, mask.window, softcap, position_bias, s_aux)
    return from_latents(module, output) if absorbed else output, None


AttentionInterface.register(CACHED, _attention)
AttentionMaskInterface.register(CACHED, describe)

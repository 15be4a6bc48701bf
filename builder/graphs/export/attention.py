"""Attention fused at export: an attention function of transformers whose body is an engine's own operator.

transformers looks attention functions up by name (AttentionInterface) in every architecture that follows it, so
nothing has to be recognised in the exported graph. Operators, as in ONNX Runtime's ContribOperators.md: com.microsoft
MultiHeadAttention where tokens see those after them, and GroupQueryAttention without a cache where they do not.

MultiHeadAttention has no sinks (a score of each head's softmax that goes to no value), so a sink is one more key here,
whose value is zero. Queries and keys get one more number, with which the queries' 1 takes each head's score from that
key; that of the other keys is zero. Knows tensors; knows no architecture and no task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from builder.common.errors import ExportError
from builder.graphs.export.masks import Causal, band_of, causal_of, hides_nothing
from builder.graphs.onnx.bands import BAND

ONNXRUNTIME = "onnxruntime_multi_head_attention"
UNFUSED = "eager"
GROUPED_SIZES = 8  # GroupQueryAttention takes heads of multiples of so many numbers (group_query_attention_helper.h)
# Arguments of an attention function that those here and in cached_attention.py do not name and that change no score:
# positions are in queries and keys already; the others are about kernels and the results of a forward pass.
HARMLESS = frozenset({
    "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_shared_kv_states", "return_dict", "deterministic", "logits_to_keep",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
})  # fmt: skip


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    key_padding_mask: torch.Tensor | None = None,
    attention_bias: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Emit one MultiHeadAttention node: softmax(query key^T * scale + bias) value.

    query, key, value: (batch, heads, sequence, head size); key_padding_mask: (batch, keys), true where a key
    counts; attention_bias: (batch or 1, heads or 1, queries or 1, keys), added to the scores; with `causal`, keys
    after a query do not count. Heads of keys and values are repeated where there are fewer than of queries.
    Returns (batch, sequence, heads, head size).
    """
    if key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    batch, heads, queries, _ = query.shape
    size = value.shape[-1]
    if attention_bias is not None:  # ONNX Runtime before 1.20 broadcasts neither the batch nor the heads, none queries
        attention_bias = attention_bias.expand(batch, heads, queries if attention_bias.shape[2] == 1 else -1, -1)
    fused = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [
            *(merge_heads(tensor) for tensor in (query, key, value)),
            None,
            None if key_padding_mask is None else key_padding_mask.to(torch.int32),
            attention_bias,
        ],
        attrs={"num_heads": int(heads), "scale": float(scale), **({"unidirectional": 1} if causal else {})},
        dtype=query.dtype,
        shape=(batch, queries, heads * size),
        version=1,
    )
    return fused.reshape(batch, queries, heads, size)


def banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    padding: torch.Tensor,
    band: int,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Emit one MultiHeadAttention node in which each token sees `band` tokens on each side, and its head's sink.

    builder/graphs/onnx/bands.py splits it into blocks. query: (batch, heads, sequence, head size); key, value: (batch,
    key heads, sequence, head size); padding: (batch, sequence), true where a token counts; sinks: (heads,).
    Returns (batch, sequence, heads, head size).
    """
    batch, heads, sequence, size = query.shape
    repeats = heads // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    last = torch.cat([torch.zeros(heads, size), sinks[:, None].float() / scale], dim=1)
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    key = torch.cat([key, torch.zeros_like(key[..., :1])], dim=-1)
    key = torch.cat([key, last[None, :, None].expand(batch, -1, -1, -1)], dim=2)
    value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2)
    fused = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [*(merge_heads(tensor) for tensor in (query, key, value)), None, padding.to(torch.int32)],
        attrs={"num_heads": int(heads), "scale": float(scale), BAND: band},
        dtype=query.dtype,
        shape=(batch, sequence, heads * size),
        version=1,
    )
    return fused.reshape(batch, sequence, heads, size)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Emit one GroupQueryAttention node without a cache: each token sees itself and those before it.

    Rows are padded at their end, where no token that counts sees the padding: the operator needs no mask, and each row
    has as many keys as the longest. Heads that it does not take become one MultiHeadAttention node.
    query: (batch, heads, sequence, head size); key, value: (batch, key heads, sequence, head size).
    Returns (batch, sequence, heads, head size).
    """
    batch, heads, sequence, size = query.shape
    if value.shape[-1] != size or size % GROUPED_SIZES:
        return multi_head_attention(query, key, value, scale, causal=True)
    keys = torch.full((batch,), sequence - 1, dtype=torch.int32)
    total = torch.full((1,), sequence, dtype=torch.int32)
    present = (batch, key.shape[1], sequence, size)
    output, _, _ = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*(merge_heads(tensor) for tensor in (query, key, value)), None, None, keys, total],
        attrs={"num_heads": int(heads), "kv_num_heads": int(key.shape[1]), "scale": float(scale)},
        dtypes=[query.dtype] * 3,
        shapes=[(batch, sequence, heads * size), present, present],
        version=1,
    )
    return output.reshape(batch, sequence, heads, size)


def merge_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, sequence, size) as (batch, sequence, heads * size), as the fused operators take it."""
    batch, heads, sequence, size = tensor.shape
    return tensor.transpose(1, 2).reshape(batch, sequence, heads * size)


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise ExportError for an argument of an attention, beside its tensors, that may change its scores."""
    unknown = [name for name, value in options.items() if value is not None and name not in HARMLESS]
    if unknown:
        raise ExportError(f"attention with {min(unknown)} has no fused operator")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Causal | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as a function of transformers; `s_aux` are the sinks.

    The mask comes from `_mask` below: causal, 2-D (keys) or 4-D (scores). A window is in the scores.
    """
    refuse_unknown(options)
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    if s_aux is not None:
        if not hasattr(attention_mask, BAND) or position_bias is not None:
            raise ExportError("attention with sinks has a fused operator for tokens that see a band around them alone")
        band, padding = getattr(attention_mask, BAND)
        return banded_attention(query, key, value, scale, padding, band, s_aux), None
    if isinstance(attention_mask, Causal):
        if position_bias is not None:
            return multi_head_attention(query, key, value, scale, None, position_bias, causal=True), None
        return causal_attention(query, key, value, scale), None
    bias = position_bias
    padding = None
    if attention_mask is not None and attention_mask.dim() == 2:
        padding = attention_mask
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    return multi_head_attention(query, key, value, scale, padding, bias), None


def _mask(
    *, mask_function: Any, attention_mask: torch.Tensor | None = None, local_size: int | None = None, **options: Any
) -> torch.Tensor | Causal | None:
    """Return the padding mask unchanged (batch, keys) where only padding is masked, `Causal`, or additive scores."""
    if hides_nothing(mask_function, local_size):
        return attention_mask
    if causal_of(mask_function) is not None:
        return Causal()
    options["allow_is_bidirectional_skip"] = False
    scores: torch.Tensor = eager_mask(mask_function=mask_function, attention_mask=attention_mask, **options)
    band = band_of(mask_function, local_size)
    if band is not None and attention_mask is not None:
        setattr(scores, BAND, (band, attention_mask))  # lost with the first change to the scores, as it has to be
    return scores


AttentionInterface.register(ONNXRUNTIME, _attention)
AttentionMaskInterface.register(ONNXRUNTIME, _mask)

"""Size of the cache that a card has memory for, where the specification leaves it open.

On cards before compute capability 8.0 attention over slots expands the keys and values of whole slots to all heads at
each step, with memory efficient attention, the one kernel that they have. Over blocks a step of one token a row reads
the blocks where they are, and one with prompts expands the tokens that rows have: blocks are the default there. Source:
onnxruntime, contrib_ops/cuda/bert/group_query_attention_impl.cu (EfficientAttention) and paged_attention.cc
(decode_eligible, needs_dense_kv); the wheel of 1.31.1 has the kernel, PagedDecodeSplitKV.
"""

from __future__ import annotations

from collections.abc import Sequence

from builder.common.cards import CARDS
from builder.common.memory import cache_bytes
from builder.common.releases import runtime_has, version_tuple
from builder.engines.cuda import MAX_PREFILL, MIN_CAPABILITY, PAGED
from builder.engines.gpu import CONTEXT, HEADROOM, SERVER_ON_CARD
from builder.options import BuildSpec
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.cuda import MAX_NUMBERS
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import block_tokens

MAX_SLOTS = 64
# Shares of the memory that weights leave free. The rest is for what a step computes and, with blocks on older cards,
# for the expanded keys and values of a layer.
IN_SLOTS, IN_BLOCKS = 0.8, 0.5


def card_of(spec: BuildSpec) -> tuple[str, float] | None:
    """Return the card that serves and its bytes: that of --gpu, or of the machine in the specification."""
    gpu, cards = spec.gpu, spec.machine.gpus
    if gpu.card is not None:
        return gpu.card, CARDS[gpu.card].memory_mb * 2.0**20
    return (cards[gpu.devices[0]].name, cards[gpu.devices[0]].memory) if cards else None


def is_before_flash(card: str) -> bool:
    """Return True if the card has no FlashAttention, so that its attention expands keys and values."""
    return version_tuple(CARDS[card].compute_capability) < version_tuple(MIN_CAPABILITY)


def sized(spec: BuildSpec, layers: Sequence[LayerShape], width: int, weights: int, length: int) -> BuildSpec:
    """Return `spec` with --slots or, on cards before 8.0, --cache-gb by the memory of the card, if neither is given.

    `width`: bytes of a number of the cache; `weights`: bytes as served; `length`: tokens of the longest text.
    """
    card, in_process = card_of(spec), spec.executor == "in-process"
    if card is None or spec.cache_gb is not None or "slots" in spec.model_fields_set:
        return spec
    name, memory = card
    limit = spec.gpu.memory_limit_mb
    free = HEADROOM * memory - SERVER_ON_CARD - (CONTEXT if in_process else 0)
    free = min(free, free if limit is None else limit * 2.0**20) - weights
    of_text, block = cache_bytes(layers, 1, length, width), block_tokens(Geometry.pairs(layers))
    has_blocks = in_process and runtime_has(PAGED, spec.triton, in_process) and spec.prefill_tokens <= MAX_PREFILL
    if is_before_flash(name) and has_blocks and IN_BLOCKS * free > cache_bytes(layers, 1, length + block, width):
        return spec.model_copy(update={"cache_gb": round(IN_BLOCKS * free / 1e9, 6)})
    creatable = MAX_NUMBERS // (length * max(layer.heads * layer.size for layer in layers))
    return spec.model_copy(update={"slots": max(1, min(MAX_SLOTS, creatable, int(IN_SLOTS * free // of_text)))})

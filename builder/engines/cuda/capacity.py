"""Size of the cache that a card has memory for, where the specification leaves it open.

On cards before compute capability 8.0 attention over slots expands the keys and values of whole slots to all heads at
each step, with memory efficient attention, the one kernel that they have. Over blocks a step of one token a row reads
the blocks where they are, and one with prompts expands the tokens that rows have: blocks are the default there. Source:
onnxruntime, contrib_ops/cuda/bert/group_query_attention_impl.cu (EfficientAttention) and paged_attention.cc
(decode_eligible, needs_dense_kv); the wheel of 1.31.1 has the kernel, PagedDecodeSplitKV.

On newer cards either reads the cache where it is, without a copy and without waiting for lengths. For one token a row
slots have kernels that blocks lack (group_query_attention.cc: XQA, FlashAttention that reads the keys of a group of
heads once), and cuDNN, from 9.0 on, prepares fewer plans for them (pull request 32493). Blocks hold more sequences,
whose texts are seldom as long as the longest: they are the default where memory ends before MAX_SLOTS slots do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from builder.checkpoints.activations import DecodingStep
from builder.common.cards import CARDS
from builder.common.memory import cache_bytes
from builder.common.releases import version_tuple
from builder.engines.cuda import MIN_CAPABILITY, why_no_blocks
from builder.engines.gpu import CONTEXT, HEADROOM, SERVER_ON_CARD
from builder.options import BuildSpec
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.cuda import MAX_NUMBERS
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import block_tokens

MAX_SLOTS = 64  # sequences
# Shares of the memory that weights leave free. The rest is for what a step computes and, with blocks on older cards,
# for the expanded keys and values of a layer.
SHARE, SHARE_BEFORE_FLASH = 0.8, 0.5


def card_of(spec: BuildSpec) -> tuple[str, float] | None:
    """Return the card that serves and its bytes: that of --gpu, or of the machine in the specification."""
    gpu, cards = spec.gpu, spec.machine.gpus
    if gpu.card is not None:
        return gpu.card, CARDS[gpu.card].memory_mb * 2.0**20
    return (cards[gpu.devices[0]].name, cards[gpu.devices[0]].memory) if cards else None


def is_before_flash(card: str) -> bool:
    """Return True if the card has no FlashAttention, so that its attention expands keys and values."""
    return version_tuple(CARDS[card].compute_capability) < version_tuple(MIN_CAPABILITY)


def sized(
    spec: BuildSpec,
    layers: Sequence[LayerShape],
    width: int,
    weights: int,
    length: int,
    step: Callable[[int], DecodingStep],
    in_blocks: bool = True,
) -> BuildSpec:
    """Return `spec` with --slots and, over blocks, --cache-gb by the memory of the card, if neither is given.

    `width`: bytes of a number of the cache; `weights`: bytes as served; `length`: tokens of the longest text; `step`:
    the largest step of a number of slots; `in_blocks`: False for a cache in slots whatever the card.
    """
    card = card_of(spec)
    if card is None or not is_open(spec):
        return spec
    name, memory = card
    limit = spec.gpu.memory_limit_mb
    free = HEADROOM * memory - SERVER_ON_CARD - (CONTEXT if spec.executor == "in-process" else 0)
    free = min(free, free if limit is None else limit * 2.0**20) - weights
    of_text, block = cache_bytes(layers, 1, length, width), block_tokens(Geometry.pairs(layers))
    largest = max(layer.heads * layer.size for layer in layers)
    beside = step(0).bytes
    fit = min(SHARE * free // of_text, (free - beside) // (of_text + step(1).bytes - beside))
    slots = min(MAX_SLOTS, MAX_NUMBERS // (length * largest), int(fit))
    if in_blocks and why_no_blocks(spec) is None and (slots < MAX_SLOTS or is_before_flash(name)):
        share = SHARE_BEFORE_FLASH if is_before_flash(name) else SHARE
        size = min(share * free, free - step(MAX_SLOTS).bytes)
        size = min(size, cache_bytes(layers, MAX_NUMBERS // (block * largest), block, width))
        if size > cache_bytes(layers, 1, length + block, width):
            return spec.model_copy(update={"slots": MAX_SLOTS, "cache_gb": round(size / 1e9, 6)})
    return spec.model_copy(update={"slots": max(1, slots)})


def is_open(spec: BuildSpec) -> bool:
    """Return True if the size of the cache is left to the card."""
    return spec.cache_gb is None and "slots" not in spec.model_fields_set

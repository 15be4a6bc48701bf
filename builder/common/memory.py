"""Memory reserved by a model: weights and key-value caches.

Knows shapes and sizes; knows no engine and no graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from builder.common.errors import SpecError
from builder.runtime.contract import CacheType, LayerShape

if TYPE_CHECKING:
    from torch.nn import Module  # takes seconds to import, and checks of a repository need numbers alone

ADVICE = "or state the serving machine's memory in models.yaml (machine: {memory_gb: ...})"
BIAS_COPIES = 2  # of a bias on positions at once: as it is computed, and as attention reads it
CONVERTED_COPIES = 4  # of a layer's keys or values in fp32: converted, and with the new ones appended
MAX_CONVERTED_BYTES = 2**28  # of these; prompts that need more are attended to over the codes
CONVERSION_MEMORY = 1.25  # times these, with the codes that are read, and what an arena keeps (measured)
BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}  # bytes of a number of the cache
# bytes of a weight; int4: 4 bits in blocks of 32 with a scale of 4 bytes, and the embeddings in 8 bits
BYTES_PER_WEIGHT = {
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.0,
    "int8-static": 1.0,
    "fp8": 1.0,
    "int8-weights": 1.13,
    "int4-weights": 0.7,
}


@dataclass(frozen=True)
class ReservedMemory:
    """Bytes that a generating model reserves.

    `adapters`: LoRA matrices, in stacks and as read; `bias`: the bias on positions of the largest call; `conversion`:
    keys and values of an int8 cache in fp32.
    """

    cache: int
    weights: int
    adapters: int = 0
    bias: int = 0
    conversion: int = 0


def cache_bytes(layers: Sequence[LayerShape], slots: int, length: int, width: int = 4) -> int:
    """Return the bytes of keys and values of `slots` rows of `length` tokens, `width` bytes per number."""
    return sum(2 * shape.heads * shape.size * width for shape in layers) * slots * length


def state_bytes(layers: Sequence[LayerShape]) -> int:
    """Return the bytes of the states of one row, whatever its length."""
    return sum(math.prod(shape) for layer in layers for shape in layer.states) * BYTES_PER_VALUE["float32"]


def bias_bytes(heads: int, tokens: int, length: int) -> int:
    """Return the bytes of a bias on positions: of `heads` heads, in a call of `tokens` tokens of `length` positions."""
    return BIAS_COPIES * heads * tokens * length * BYTES_PER_VALUE["float32"]


def conversion_bytes(layers: Sequence[LayerShape], cache: CacheType, length: int) -> int:
    """Return the bytes that a prompt in a slot of `length` tokens takes in fp32, a layer at a time; of int8 alone."""
    if cache != "int8":
        return 0
    copies = CONVERTED_COPIES * widest_layer(layers) * length * BYTES_PER_VALUE["float32"]
    return round(CONVERSION_MEMORY * min(MAX_CONVERTED_BYTES, copies))


def widest_layer(layers: Sequence[LayerShape]) -> int:
    """Return the numbers of a token's keys, or of its values, in the layer that has the most."""
    return max(shape.heads * shape.size for shape in layers)


def largest_call(prefill_tokens: int, slots: int) -> int:
    """Return the tokens of the largest call of a decode loop: a piece of a prompt, or a token of each slot."""
    return max(prefill_tokens, slots)


def encoder_call(token_budget: int, max_length: int) -> int:
    """Return the tokens of the largest call of an encoder: its budget, or a text that is longer."""
    return max(token_budget, max_length)


def weights_bytes(model: Module) -> int:
    """Return the bytes of the parameters in fp32."""
    return sum(parameter.numel() * np.dtype(np.float32).itemsize for parameter in model.parameters())


def refuse_slots(cache: int, usable: float, needs: str, slots: str, lower: str) -> None:
    """Raise SpecError if a cache of `cache` bytes exceeds the `usable` ones.

    `needs`: "the cache needs"; `slots`: what it holds, in words; `lower`: the options to lower.
    """
    if cache > usable:
        raise SpecError(
            f"{needs} {cache / 1e9:.1f} GB ({slots}) and {usable / 1e9:.1f} GB may be used; lower {lower}, {ADVICE}"
        )


def blocks_that_fit(size: float, block: int, length: int, block_tokens: int) -> int:
    """Return how many blocks of `block` bytes, of `block_tokens` tokens each, fit into `size` bytes.

    Raises SpecError if one text of `length` tokens would not fit.
    """
    blocks, text = int(size // block), -(-length // block_tokens)
    if blocks < text:
        raise SpecError(
            f"a cache of {size / 1e9:.3g} GB has {blocks} blocks of {block_tokens} tokens, and a text of {length} "
            f"tokens needs {text} ({text * block / 1e9:.3g} GB): raise --cache-gb, or lower --max-length"
        )
    return blocks

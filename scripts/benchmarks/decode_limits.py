"""Compute the most tokens a second that a decoder of a shape can generate on this machine, whatever the software.

A step of several clients reads the weights once, and the cache and states of each client. With experts it reads those
that at least one client's token chose; routers with random weights choose evenly. 8 bits a weight and a cached number,
32 bits a number of a state, which is written too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from builder.common.memory import cache_bytes, state_bytes
from builder.runtime.contract import LayerShape

EMBEDDINGS = "embed_tokens.weight"


def decode_limit(
    checkpoint: Path, layers: Sequence[LayerShape], clients: int, context: int, limits: Mapping[str, float]
) -> float:
    """Return tokens a second of all clients; `layers`: what each caches; `limits`: those of `machine_limits`."""
    experts, others, chosen, of = _weights(checkpoint)
    read = others + experts * (1 - (1 - chosen / of) ** clients)
    multiplied = 2 * clients * (others + experts * chosen / of)
    memory = read + cache_bytes(layers, clients, context, 1) + 2 * clients * state_bytes(layers)
    return clients / max(memory / 1e9 / limits["bandwidth"], multiplied / 1e9 / limits["int8"])


def cached_layers(repository: Path) -> list[LayerShape]:
    """Return what each layer of a built repository's model caches."""
    serving: dict[str, Any] = json.loads((repository / "model" / "1" / "serving.json").read_text("utf-8"))
    return [LayerShape(**layer) for layer in serving["arena"]["layers"]]


def _weights(checkpoint: Path) -> tuple[int, int, int, int]:
    """Return the weights of experts and of all else that a step multiplies by, and the chosen experts of how many."""
    config = AutoConfig.from_pretrained(checkpoint)
    of = getattr(config, "num_local_experts", 0) or 1
    chosen = config.num_experts_per_tok if of > 1 else 1
    experts = others = 0
    for name, shape in _shapes(checkpoint / "model.safetensors").items():
        if len(shape) == 3 and shape[0] == of > 1:
            experts += math.prod(shape)
        elif config.tie_word_embeddings or not name.endswith(EMBEDDINGS):
            others += math.prod(shape)
    return experts, others, chosen, of


def _shapes(path: Path) -> dict[str, list[int]]:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}

"""BigBird: attends to all keys of a short text, in blocks and to random keys (arXiv:2007.14062) of a longer one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdSelfAttention

from builder.graphs.export.architectures.megatron_bert import attend


def full_attention_limit(config: BigBirdConfig) -> int:
    """Return the most tokens of a text in which each attends to all before it, as transformers decides it."""
    if config.attention_type == "original_full":
        return config.max_position_embeddings
    return (5 + 2 * config.num_random_blocks) * config.block_size


def _forward(
    self: Any, hidden_states: torch.Tensor, *masks: Any, past_key_values: Any = None, **options: Any
) -> tuple[torch.Tensor, Any]:
    if past_key_values is None:
        result: tuple[torch.Tensor, Any] = _original(self, hidden_states, *masks, **options)
        return result
    return attend(self, hidden_states, past_key_values=past_key_values)


_original = BigBirdSelfAttention.forward
REPLACED = (BigBirdSelfAttention, "forward", _forward)

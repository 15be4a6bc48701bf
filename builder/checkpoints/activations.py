"""Numbers that a model computes for its tokens, by its configuration, where its layers are not fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.common.memory import BYTES_PER_VALUE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# times the tokens of a step: padding to powers of two at most doubles them, and regions for all of the shorter powers
# are together as large as that of the largest
REGIONS = 4


def layer_numbers(config: PreTrainedConfig) -> int:
    """Return the numbers of a token in one layer: twice the inner state and 4 times the hidden one."""
    text = config.get_text_config()
    hidden: int = text.hidden_size
    return 2 * (getattr(text, "intermediate_size", None) or 4 * hidden) + 4 * hidden


@dataclass(frozen=True)
class DecodingStep:
    """Largest step of a decode loop on a card: a piece of a prompt, and a token of each slot.

    `token_bytes`: of each of the `tokens`; `row_bytes`: logits of each of the `slots`.
    """

    tokens: int
    token_bytes: int
    slots: int
    row_bytes: int

    @classmethod
    def of(cls, config: PreTrainedConfig, prefill_tokens: int, slots: int, width: int) -> DecodingStep:
        """Return the step of a decoder that computes in numbers of `width` bytes."""
        row = config.get_text_config().vocab_size * BYTES_PER_VALUE["float32"]
        return cls(prefill_tokens + slots, layer_numbers(config) * width, slots, row)

    @property
    def bytes(self) -> int:
        """Memory that it takes from an arena that keeps regions of the shorter steps before it."""
        return REGIONS * (self.tokens * self.token_bytes + self.slots * self.row_bytes)

    @property
    def formula(self) -> str:
        """Formula of `bytes`, for a plan."""
        return (
            f"{REGIONS} x ({self.tokens} tokens of a step x {self.token_bytes} bytes + {self.slots} slots x "
            f"{self.row_bytes} bytes of logits)"
        )

"""DeepSeek-V2: rotates by products of complex numbers."""

from __future__ import annotations

from transformers.models.deepseek_v2 import modeling_deepseek_v2

from builder.graphs.export.complex_rotary import angles, rotate_pairs

REPLACED = (
    (modeling_deepseek_v2.DeepseekV2RotaryEmbedding, "forward", angles),
    (modeling_deepseek_v2, "apply_rotary_emb", rotate_pairs),
)

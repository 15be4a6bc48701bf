"""Gemma 4: layers that share keys and values run on all tokens, as the others do.

transformers cuts the mask, too, to the tokens whose logits are needed; the fused attention has none to cut.
"""

from __future__ import annotations

from typing import Any

from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel


def keep_all_tokens(self: Any, *inputs: Any, **options: Any) -> tuple[Any, ...]:
    """Return `inputs` of the remaining layers as they are; the last one is the number of tokens to keep."""
    return inputs[:-1]


REPLACED = (Gemma4TextModel, "_maybe_slice_kv_shared_inputs", keep_all_tokens)

"""GIT: BERT's attention in a decoder, whose mask leaves the tokens of an image unmasked; a text has none."""

from __future__ import annotations

from typing import Any

from transformers.models.git import modeling_git
from transformers.models.git.modeling_git import GitSelfAttention

from builder.graphs.export.architectures.megatron_bert import attend


def _mask(*, block_sequence_ids: Any, **options: Any) -> Any:
    return _causal_mask(**options)


_causal_mask = modeling_git.create_causal_mask
REPLACED = (
    (GitSelfAttention, "forward", attend),
    (modeling_git, "create_causal_mask", _mask),
)

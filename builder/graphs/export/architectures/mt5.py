"""mT5: attention as T5's."""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedModel
from transformers.models.mt5.modeling_mt5 import MT5Attention

from builder.graphs.export.architectures.t5 import with_bias_by_row


def fused(model: PreTrainedModel) -> AbstractContextManager[None]:
    return with_bias_by_row(MT5Attention)

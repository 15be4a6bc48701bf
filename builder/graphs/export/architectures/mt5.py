"""mT5: attention as T5's."""

from __future__ import annotations

from transformers.models.mt5.modeling_mt5 import MT5Attention

from builder.graphs.export.architectures.t5 import bias_by_row

REPLACED = bias_by_row(MT5Attention)

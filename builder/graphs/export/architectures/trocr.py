"""TrOCR's decoder: the attention of XGLM under another class name."""

from __future__ import annotations

from transformers.models.trocr.modeling_trocr import TrOCRAttention

from builder.graphs.export.architectures.xglm import attend

REPLACED = (TrOCRAttention, "forward", attend)

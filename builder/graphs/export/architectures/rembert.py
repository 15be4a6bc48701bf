"""RemBERT: the attention of Megatron-BERT under another class name."""

from __future__ import annotations

from transformers.models.rembert.modeling_rembert import RemBertSelfAttention

from builder.graphs.export.architectures.megatron_bert import attend

REPLACED = (RemBertSelfAttention, "forward", attend)

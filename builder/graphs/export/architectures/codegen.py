"""CodeGen: GPT-J's attention under another class name."""

from __future__ import annotations

from transformers.models.codegen.modeling_codegen import CodeGenAttention

from builder.graphs.export.architectures.gptj import attend

REPLACED = (CodeGenAttention, "_attn", attend)

"""CodeGen: GPT-J's attention under another class name."""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedModel
from transformers.models.codegen.modeling_codegen import CodeGenAttention

from builder.graphs.export.architectures import replaced_method
from builder.graphs.export.architectures.gptj import attend


def fused(model: PreTrainedModel) -> AbstractContextManager[None]:
    return replaced_method(CodeGenAttention, attend, "_attn")

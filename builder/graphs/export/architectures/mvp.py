"""MVP: the attention of XGLM under another class name."""

from __future__ import annotations

from transformers.models.mvp.modeling_mvp import MvpAttention

from builder.graphs.export.architectures.xglm import attend

REPLACED = (MvpAttention, "forward", attend)

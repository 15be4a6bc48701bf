"""Inputs of the fused attention of encoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from builder.common.errors import ExportError
from builder.graphs.export.attention import ONNXRUNTIME, multi_head_attention


def test_bias_is_expanded_to_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayoutLM adds its padding as (batch, 1, 1, keys); ONNX Runtime refuses a bias of one query for many."""
    biases = []

    def symbolic(name: str, inputs: list[torch.Tensor | None], **options: Any) -> torch.Tensor:
        biases.append(inputs[-1])
        return torch.zeros(options["shape"])

    monkeypatch.setattr(torch.onnx.ops, "symbolic", symbolic)
    states = torch.zeros(2, 4, 7, 8)
    multi_head_attention(states, states, states, 1.0, attention_bias=torch.zeros(2, 1, 1, 7))
    multi_head_attention(states, states, states, 1.0, attention_bias=torch.zeros(1, 4, 7, 7))
    assert [tuple(bias.shape) for bias in biases if bias is not None] == [(2, 4, 7, 7), (2, 4, 7, 7)]


def test_attention_refuses_arguments_without_an_operator() -> None:
    """Regression: A.X-K2 passes selected keys to its attention, not in the mask, and the graph attended to all keys."""
    states = torch.zeros(2, 4, 7, 8)
    attention = AttentionInterface()[ONNXRUNTIME]
    with pytest.raises(ExportError, match="attention with indices has no fused operator"):
        attention(
            torch.nn.Module(), states, states, states, None, indices=torch.zeros(2, 7, 3), output_attentions=False
        )

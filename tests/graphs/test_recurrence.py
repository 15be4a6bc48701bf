"""A recurrence over rows of different lengths, as one operator, against PyTorch's packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from builder.checkpoints.recurrence import Recurrence
from builder.engines import infer_with
from builder.graphs.export.program import export_graph
from builder.graphs.export.recurrence import recurrent_operators


class _Rows(torch.nn.Module):
    """A recurrence with its inputs by position, as a graph has them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.recurrence = Recurrence(8, layers)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.recurrence(*tensors))


@pytest.mark.parametrize("layers", [1, 2])
def test_recurrence_is_one_operator_a_layer(layers: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = _Rows(layers)
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length")
    example = [torch.randn(2, 5, 8), torch.tensor([5, 3])]
    with recurrent_operators(module):
        graph = export_graph(
            tmp_path / "model.onnx", module, example, [{0: rows, 1: length}, {0: rows}], ["words", "counts"], ["out"]
        )
    assert graph.operators["LSTM"] == layers
    words, counts = torch.randn(4, 9, 8), torch.tensor([9, 1, 4, 9])
    with torch.no_grad():
        expected = module(words, counts).numpy()
    actual = infer_with(graph, 1)({"words": words.numpy(), "counts": counts.numpy()})["out"]
    assert np.abs(actual - expected).max() < 1e-6
    assert not expected[1, 1:].any()

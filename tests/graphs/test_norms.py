"""RMSNorm in each spelling: one operator of ONNX Runtime, equal to PyTorch; what only resembles it stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.engines import infer_with
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.norms import recognisable_norms
from builder.graphs.export.program import export_graph
from builder.graphs.onnx.graph import Graph
from builder.runtime.open_vino import openvino
from tests.decoders import make_decoder

SIZE = 16
Compute = Callable[["Norm", torch.Tensor], torch.Tensor]


class Norm(torch.nn.Module):
    """Compute `spelling` with a random weight, or without one."""

    def __init__(self, spelling: Compute, weighted: bool = True, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.spelling = epsilon, spelling
        if weighted:
            self.weight = torch.nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(1)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.spelling(self, hidden)


class GatedNorm(Norm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        normed = super().forward(hidden)
        return normed if gate is None else normed * gate


def by_power(self: Norm, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.pow(hidden.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)


def by_rsqrt(self: Norm, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


SPELLINGS = {
    "power": Norm(lambda self, x: by_power(self, x) * self.weight),
    "power without a weight": Norm(by_power, weighted=False),
    "weight first": Norm(lambda self, x: self.weight * by_rsqrt(self, x), epsilon=1e-5),
    "weight around zero": Norm(lambda self, x: by_rsqrt(self, x) * (1.0 + self.weight)),
    "torch's": torch.nn.RMSNorm(SIZE, eps=1e-6),
}
OTHERS = {
    "of another axis": Norm(lambda self, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps), False),
    "epsilon of the root": Norm(lambda self, x: self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)),
    "sum": Norm(lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps), False),
    "centred": torch.nn.LayerNorm(SIZE),
    "gated": GatedNorm(lambda self, x: self.weight * by_rsqrt(self, x)),
    "in groups": Norm(lambda self, x: by_rsqrt(self, x.reshape(*x.shape[:-1], 2, SIZE // 2)).flatten(-2) * self.weight),
}


class Block(torch.nn.Module):
    """A norm over all features (`heads` 0), or over those of each head, which come before the tokens."""

    def __init__(self, norm: torch.nn.Module, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = norm, heads

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        (hidden,) = tensors
        if not self.heads:
            return self.norm(hidden)  # type: ignore[no-any-return]
        normed = self.norm(hidden.reshape(*hidden.shape[:-1], self.heads, SIZE).transpose(1, 2))
        return normed.transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


def export_norm(norm: torch.nn.Module, heads: int, folder: Path) -> Graph:
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
    example = torch.randn(3, 5, SIZE * max(heads, 1))
    return export_graph(folder / "norm.onnx", Block(norm, heads), [example], [{0: batch, 1: sequence}], ["x"], ["y"])


@pytest.mark.parametrize("heads", [0, 1, 4])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_norm_in_each_spelling_is_one_operator(spelling: str, heads: int, tmp_path: Path) -> None:
    graph = fuse(export_norm(SPELLINGS[spelling], heads, tmp_path), tmp_path)
    assert graph.operators["SimplifiedLayerNormalization"] == 1
    assert not graph.operators["ReduceMean"] + graph.operators["Transpose"]
    for shape, scale in (((1, 1), 1.0), ((2, 7), 1e-3), ((4, 33), 30.0)):
        values = torch.randn((*shape, SIZE * max(heads, 1)), generator=torch.Generator().manual_seed(2)) * scale
        with torch.no_grad():
            expected = Block(SPELLINGS[spelling], heads)(values).numpy()
        np.testing.assert_allclose(infer_with(graph, 1)({"x": values.numpy()})["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", OTHERS)
def test_modules_that_resemble_a_norm_are_unchanged(kind: str) -> None:
    with recognisable_norms(OTHERS[kind]):
        assert "forward" not in vars(OTHERS[kind])


def test_norm_is_unchanged_after_the_export() -> None:
    norm = SPELLINGS["power"]
    with recognisable_norms(norm):
        assert "forward" in vars(norm)
    assert "forward" not in vars(norm)


def test_norm_keeps_the_type_of_its_input() -> None:
    norm, values = SPELLINGS["power"], torch.randn(2, 3, SIZE).half()
    with recognisable_norms(norm), torch.no_grad():
        assert norm(values).dtype == torch.float16


def test_norms_of_heads_are_one_operator_too(tmp_path: Path) -> None:
    """Regression: norms of Gemma 3's queries and keys ran as six operators."""
    graph = fuse(export_decoder(make_decoder("gemma3_text"), tmp_path, 64).graph, tmp_path)
    assert (graph.operators["SimplifiedLayerNormalization"], graph.operators["ReduceMean"]) == (13, 0)


def test_openvino_fuses_the_norm_too(tmp_path: Path) -> None:
    graph = export_norm(SPELLINGS["power"], 0, tmp_path)
    compiled = openvino.Core().compile_model(str(graph.path), "CPU")
    assert "RMS" in {one.get_rt_info()["layerType"] for one in compiled.get_runtime_model().get_ordered_ops()}

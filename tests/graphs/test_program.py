"""A captured program is traced again only to decompose an operator; the graph is the same either way."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxscript import TracedOnnxFunction
from onnxscript.rewriter import RewriteRule
from torch.fx import config as tracing
from torch.onnx._internal.exporter._registration import OnnxDecompMeta, ONNXRegistry
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter

from builder.common.errors import ExportError
from builder.graphs.export import exporter_shortcuts, program
from builder.graphs.export.program import OPSET, to_onnx

SOURCE = "pkg.torch.onnx.stack_trace"  # of a node: the lines of source that it comes from


class Casts(torch.nn.Module):
    """Module with a cast, and one that changes nothing."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        real = ids.to(torch.float32).to("cpu")
        return (real * 2 + 1,)


class Returns(torch.nn.Module):
    """Module whose output is its input, by an operator that torch's table lacks."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        return (ids + 1, ids.to(torch.int64))


class Varies(torch.nn.Module):
    """Module that computes a variance, for which ONNX has no operator."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        return (torch.var(ids.to(torch.float32), dim=-1),)


class Writes(torch.nn.Module):
    """Module that writes into an unshared tensor, compares by an operator of two names, and detaches a constant."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = torch.zeros_like(ids)
        total.add_(ids)
        return (torch.min(total * ids, torch.tensor(7)),)


class Shares(torch.nn.Module):
    """Module that writes into a tensor of which another is a part."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = torch.zeros_like(ids)
        part = total[:1]
        total.add_(ids)
        return (total * ids + part,)


class Routes(torch.nn.Module):
    """Module that chooses and scales columns in place, and adds rows, as layers of experts do."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        scores = ids * 0.5 + 1.0
        chosen = torch.zeros_like(scores)
        chosen.scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
        scores.scatter_(1, scores.argmin(-1, keepdim=True), chosen[:, :1])
        scores /= scores.sum(-1, keepdim=True)
        turned = torch.stack([scores, chosen], dim=1).transpose(1, 2)
        turned *= 2.0
        turned += turned.amax(1, keepdim=True)
        sums = torch.zeros_like(turned).index_add(-1, torch.zeros(2, dtype=torch.int64), turned)
        return turned.square(), sums, (scores > 0) & (chosen > 0)


class Parts(torch.nn.Module):
    """Module that adds to a part of a tensor in place, as Gemma 3n does."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = ids * 2 + 1
        before = total * 3
        total[1:] += ids[1:]
        return total * ids, before


class ReturnsPart(torch.nn.Module):
    """Module whose output is a tensor that it added to in place."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = ids * 2 + 1
        total[1:] += ids[1:]
        return (total,)


class Drops(torch.nn.Module):
    """Module that writes into results of dropouts, and into a view of one, which in eval mode are their inputs."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        first, second = ids * 0.5, ids * 0.25
        dropped = torch.nn.functional.dropout(first, 0.1, self.training)
        dropped *= 2.0
        columns = torch.nn.functional.dropout(second, 0.1, self.training)[:, 1:]
        columns *= 2.0
        return (first + 1.0, second + 1.0)


class Copies(torch.nn.Module):
    """Module that writes into a copy of a tensor with that tensor's type."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = ids * 2
        copied = total.to(torch.int64, copy=True)
        copied += ids
        return (total * copied,)


class Keeps(torch.nn.Module):
    """Module that adds to a part of a tensor that another part overlaps."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = ids * 2 + 1
        rows = total[:2]
        total[1:] += ids[1:]
        return total * 2, rows * 3


class Overwrites(torch.nn.Module):
    """Module that writes into its own weight."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        self.total *= 0.0
        return (ids + self.total,)


class Widens(torch.nn.Module):
    """Module that writes double precision into a tensor that stays in single precision."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        total = ids * 0.1
        total.add_(ids.to(torch.float64))
        return (total,)


class Fixes(torch.nn.Module):
    """Module that converts its number of rows to a Python integer."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        return (ids + torch.arange(int(ids.shape[0]) if math.sqrt(ids.shape[0]) < 2 else 3)[:, None],)


class Joins(torch.nn.Module):
    """Module that adds (batch, sequence) to (batch, sequence, sequence), like attention with a wrong mask."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        return (ids[:, None, :] * ids[:, :, None] + ids,)


@pytest.mark.parametrize(
    ("module", "traced"),
    [
        (Casts(), 0),
        (Returns(), 1),
        (Varies(), 1),
        (Writes(), 0),
        (Routes(), 0),
        (Parts(), 0),
        (ReturnsPart(), 1),
        (Drops(), 1),
        (Copies(), 0),
        (Keeps(), 1),
        (Shares(), 1),
        (Overwrites(), 1),
        (Widens(), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_program_is_traced_again_only_if_needed(
    module: torch.nn.Module, traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []
    decompose = torch.export.ExportedProgram.run_decompositions

    def counted(program: torch.export.ExportedProgram, *arguments: Any) -> torch.export.ExportedProgram:
        again.append(program)
        return decompose(program, *arguments)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    ids = torch.arange(6).reshape(2, 3)
    outputs = [f"output_{number}" for number in range(len(module(ids)))]
    model = to_onnx(module, [ids], [{0: torch.export.Dim("batch")}], ["ids"], outputs)
    assert len(again) == traced
    assert torch.export.ExportedProgram.run_decompositions is counted, "it is put back"
    session = onnxruntime.InferenceSession(model.SerializeToString())
    fed = torch.arange(12).reshape(4, 3)
    for actual, expected in zip(session.run(None, {"ids": fed.numpy()}), module(fed), strict=True):
        np.testing.assert_array_equal(actual, expected.numpy())


def test_axis_fixed_to_the_size_of_the_example_is_refused() -> None:
    """Regression: the export succeeded, and the first batch of another size failed in the engine."""
    axes = [{0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}]
    with pytest.raises(ExportError, match=r"sizes of its input into numbers.*axis 0 of ids \(2\), axis 0 of out \(2\)"):
        to_onnx(Fixes(), [torch.arange(6).reshape(2, 3)], axes, ["ids"], ["out"])


def test_joined_axes_are_refused() -> None:
    """Regression: BigBird-Pegasus's encoder was exported, and its first call failed in the engine."""
    axes = [{0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}]
    with pytest.raises(ExportError, match="its code takes batch and sequence for one size, so that the graph is for"):
        to_onnx(Joins(), [torch.arange(14).reshape(2, 7)], axes, ["ids"], ["out"])


class Mixes(torch.nn.Module):
    """Module that mixes dtypes in operators that ONNX restricts to one, and has a reshape without effect."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ids,) = tensors
        real = (ids + 0.5) * ids.shape[0] / (ids + 1)
        return (torch.where(ids > 2, real, ids).reshape(ids.shape) ** 2,)


def test_export_without_repeated_work_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal torch.onnx's own output byte for byte, but for the source lines of nodes.

    Nothing of torch or onnxscript stays replaced.
    """
    owners = (ONNXRegistry, OnnxDecompMeta, TracedOnnxFunction, _TypePromotionInterpreter, RewriteRule, tracing)
    before = [dict(vars(owner)) for owner in owners]
    axes = [{0: torch.export.Dim("batch")}]
    ids = torch.arange(6).reshape(2, 3)
    model = to_onnx(Mixes(), [ids], axes, ["ids"], ["out"])
    assert [dict(vars(owner)) for owner in owners] == before
    monkeypatch.setattr(program, "exporter_shortcuts", nullcontext)
    own = to_onnx(Mixes(), [ids], axes, ["ids"], ["out"])
    assert _without_source(model) == _without_source(own)
    (output,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"ids": ids.numpy()})
    np.testing.assert_allclose(output, Mixes()(ids)[0].numpy())


def _without_source(model: onnx.ModelProto) -> bytes:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copy.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key != SOURCE]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    return copy.SerializeToString()


def test_operator_table_without_signatures_is_complete() -> None:
    """Operators without a valid signature are missing from torch's own table."""
    kept, own = exporter_shortcuts._operators(OPSET), ONNXRegistry.from_torchlib(opset_version=OPSET)
    assert _implementations(kept) == _implementations(own)


def _implementations(table: ONNXRegistry) -> dict[object, list[object]]:
    return {target: [meta.onnx_function for meta in metas] for target, metas in table.functions.items()}


class Changes(torch.nn.Module):
    """Module that permanently replaces its child at the first call, like BigBird."""

    def __init__(self) -> None:
        super().__init__()
        self.child: torch.nn.Module = torch.nn.Identity()
        self.changed = False

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.changed:
            self.changed, self.child = True, torch.nn.ReLU()
        return (self.child(tensors[0].to(torch.float32)),)


def test_export_leaves_the_module_unchanged() -> None:
    module = Changes()
    to_onnx(module, [torch.arange(6).reshape(2, 3)], [{0: torch.export.Dim("batch")}], ["ids"], ["out"])
    assert (type(module.child), module.changed) == (torch.nn.Identity, False)

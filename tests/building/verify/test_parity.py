"""Parity checks detect wrong graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from builder.building.pipeline import build
from builder.building.verify.parity import TOLERANCE
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import Answer, Sample
from builder.checkpoints.tasks.text_classification import TextClassification
from builder.common.errors import VerificationError
from builder.graphs.export.encoder import Export, export
from builder.graphs.export.rows import Rows, rows_of
from builder.graphs.onnx.graph import save_graph
from builder.options import make_spec
from tests.graph_error import graph_error


@pytest.fixture
def exported(checkpoint: Callable[[str], Path], tmp_path: Path) -> Export:
    spec = make_spec(model=str(checkpoint("names")), name="names")
    return export(resolve(spec), tmp_path)


@pytest.fixture
def rows(checkpoint: Callable[[str], Path]) -> Rows:
    return rows_of(resolve(make_spec(model=str(checkpoint("names")))))


def _error(exported: Export, rows: Rows, path: Path) -> float:
    model = onnx.load(str(exported.graph.path))
    bias = next(t for t in model.graph.initializer if t.name.endswith("classifier.bias"))
    values = numpy_helper.to_array(bias).copy()
    values[0] += 0.01
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    return graph_error(save_graph(model, path), exported.module, rows, 512, per_token=True)


def test_parity_finds_a_small_error_in_one_weight(exported: Export, rows: Rows, tmp_path: Path) -> None:
    assert graph_error(exported.graph, exported.module, rows, 512, per_token=True) < TOLERANCE
    assert _error(exported, rows, tmp_path / "wrong" / "model.onnx") > TOLERANCE


def test_parity_refuses_nan(exported: Export, rows: Rows) -> None:
    with torch.no_grad():
        next(exported.module.model.parameters())[200:] = np.nan
    with pytest.raises(VerificationError, match="holds NaN"):
        graph_error(exported.graph, exported.module, rows, 512, per_token=True)


def test_wrong_answer_stops_the_build(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emitted code and transformers disagree about one score: nothing is published."""
    right = TextClassification.reference

    def wrong(self: TextClassification, checkpoint: Checkpoint, sample: Sample) -> Answer:
        answer = right(self, checkpoint, sample)
        return {**answer, "score": [answer["score"][0] + 0.01]}

    monkeypatch.setattr(TextClassification, "reference", wrong)
    with pytest.raises(VerificationError, match=r"not transformers' answer \(answer\.score\[0\]"):
        build(make_spec(model=str(checkpoint("topics")), name="topics", output=tmp_path / "repository"))
    assert not list((tmp_path / "repository").glob("*"))

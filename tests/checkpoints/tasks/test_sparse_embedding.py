"""Sparse embeddings equal those of sentence-transformers' SparseEncoder; other models are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SparseEncoder

from builder.building.pipeline import build
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import CheckpointError
from builder.options import make_spec
from builder.runtime.encoder.front import open_front
from tests.fronts import answers, front_over_pytorch
from tests.tiny_encoders import make_checkpoint

SPARSE = "sentence_transformers.sparse_encoder.models."
TEXTS = ["How do I renew my passport?", "The soup needs salt.", "soup"]


@pytest.fixture(scope="module")
def splade(module_folder: Callable[[str], Path]) -> Path:
    folder = make_checkpoint(module_folder("splade") / "splade", "bert", "fill-mask")
    (folder / "1_SpladePooling").mkdir()
    parts = (("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": SPARSE + kind} for i, (path, kind) in enumerate(parts)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
    pooling(folder, {"pooling_strategy": "max", "activation_function": "relu"})
    return folder


def pooling(folder: Path, config: dict[str, str]) -> None:
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(config))


def test_sparse_embedding_equals_sentence_transformers(splade: Path, tmp_path: Path) -> None:
    report = build(make_spec(model=str(splade), name="sparse", output=tmp_path / "models"))
    assert (report.task, report.verified) == ("sparse-embedding", True)
    front = open_front(tmp_path / "models" / "sparse" / "1")
    texts = np.array([[text.encode()] for text in TEXTS], np.object_)
    (answer,) = front([{"text_input": texts}])
    assert isinstance(answer, dict), answer
    indices, values = answer["indices"], answer["values"]
    assert indices.shape == values.shape
    assert ((indices < 0) == (values == 0)).all(), "what is not there has no weight"
    theirs = SparseEncoder(str(splade), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    for row, expected in enumerate(theirs.numpy()):
        actual = np.zeros_like(expected)
        actual[indices[row][indices[row] >= 0]] = values[row][indices[row] >= 0]
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_sparse_embedding_refuses_other_poolings(splade: Path) -> None:
    resolved = resolve(make_spec(model=str(splade), pooling="cls"))
    with pytest.raises(CheckpointError, match="--pooling is for dense embeddings"):
        encoder_task(resolved.task).parameters(resolved)
    try:
        pooling(splade, {"pooling_strategy": "sum"})
        with pytest.raises(CheckpointError, match="has a pooling_strategy 'sum' of its SpladePooling; known is max"):
            resolve(make_spec(model=str(splade)))
    finally:
        pooling(splade, {})


def test_sparse_embedding_keeps_max_active_dims(splade: Path, tmp_path: Path) -> None:
    """Regression: all dimensions were returned; sentence-transformers keeps only the largest ones."""
    folder = Path(shutil.copytree(splade, tmp_path / "splade"))
    general = {"model_type": "SparseEncoder", "max_active_dims": 3}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(general))
    spec = make_spec(model=str(folder))
    checkpoint = resolve(spec)
    samples = [{"text_input": text} for text in TEXTS]
    theirs = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    front = front_over_pytorch(checkpoint, spec, tmp_path)
    for answer, expected in zip(answers(front, checkpoint, samples), theirs.numpy(), strict=True):
        assert answer["indices"] == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(answer["values"], expected[answer["indices"]], atol=1e-5)
    general["max_active_dims"] = 0
    (folder / "config_sentence_transformers.json").write_text(json.dumps(general))
    with pytest.raises(CheckpointError, match="has the max_active_dims 0; expected a number of at least 1"):
        resolve(make_spec(model=str(folder)))

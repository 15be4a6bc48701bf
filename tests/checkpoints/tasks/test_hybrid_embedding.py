"""Dense, sparse and multi-vector embeddings of one call equal what BGE-M3's reference defines, computed here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builder.building.pipeline import build
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tasks.hybrid_embedding import CONVERT
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.runtime.encoder.front import open_front
from builder.runtime.encoder.pipeline import Pipeline
from tests.fronts import answers, front_over_pytorch
from tests.retrievers import hybrid_outputs, make_hybrid

UNICODE = "Zürich – 東京, and the naïve 🚆 café."
REPEATED = "The soup needs salt, the soup needs the salt."
MIXED = [TEXTS[0], UNICODE, REPEATED, TEXTS[31]]


@pytest.fixture(scope="module")
def m3(module_folder: Callable[[str], Path]) -> Path:
    return make_hybrid(module_folder("m3") / "m3")


def _front(folder: Path, target: Path, **options: Any) -> tuple[Pipeline, Any]:
    spec = make_spec(model=str(folder), task="hybrid-embedding", **options)
    checkpoint = resolve(spec)
    return front_over_pytorch(checkpoint, spec, target), checkpoint


def _assert_expected(answer: Any, expected: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Compare an answer, padded or not."""
    embedding, weights, vectors = expected
    indices, values = np.asarray(answer["indices"]), np.asarray(answer["values"])
    assert indices[indices >= 0].tolist() == np.flatnonzero(weights).tolist()
    np.testing.assert_allclose(values[indices >= 0], weights[weights > 0], atol=1e-5)
    np.testing.assert_allclose(answer["embedding"], embedding, atol=1e-5)
    count = int(np.asarray(answer["vector_count"]).item())
    assert count == len(vectors)
    np.testing.assert_allclose(np.asarray(answer["vectors"])[:count], vectors, atol=1e-5)
    assert not np.any(values[indices < 0])
    assert not np.any(np.asarray(answer["vectors"])[count:])
    assert (np.asarray(answer["offsets"])[count - 1 :] == -1).all()


def test_hybrid_embedding_equals_an_independent_computation(m3: Path, tmp_path: Path) -> None:
    """Short, long, Unicode and repeated tokens, alone, mixed in a batch, and as rows of one request."""
    front, checkpoint = _front(m3, tmp_path, truncate=True, max_length=60)
    samples = [{"text_input": text} for text in MIXED]
    (rows,) = front([{"text_input": np.array([[text.encode()] for text in MIXED], object)}])
    assert isinstance(rows, dict), rows
    mixed = answers(front, checkpoint, samples)
    for row, sample in enumerate(samples):
        expected = hybrid_outputs(m3, sample["text_input"], 60)
        assert np.count_nonzero(expected[1]) > 0
        _assert_expected(answers(front, checkpoint, [sample])[0], expected)
        _assert_expected(mixed[row], expected)
        _assert_expected({name: values[row] for name, values in rows.items()}, expected)
    assert mixed[-1]["truncated"]
    assert mixed[-1]["vector_count"] == 59


def test_offsets_are_characters_after_the_prompt(m3: Path, tmp_path: Path) -> None:
    front, checkpoint = _front(m3, tmp_path)
    (plain, prompted) = answers(
        front, checkpoint, [{"text_input": REPEATED}, {"text_input": REPEATED, "prompt": "query: "}]
    )
    places = [[start, end] for start, end in prompted["offsets"] if end >= 0]
    assert places == [place for place in plain["offsets"] if place[1] >= 0]
    assert "".join(REPEATED[start:end] for start, end in places) == REPEATED
    assert prompted["vector_count"] > plain["vector_count"]


def test_hybrid_embedding_builds_and_refuses_empty_texts(m3: Path, tmp_path: Path) -> None:
    report = build(make_spec(model=str(m3), task="hybrid-embedding", name="m3", output=tmp_path / "models"))
    assert (report.task, report.verified) == ("hybrid-embedding", True)
    front = open_front(tmp_path / "models" / "m3" / "1")
    answer, refused = front([{"text_input": np.array([[text.encode()]], object)} for text in (UNICODE, " ")])
    assert isinstance(answer, dict), answer
    _assert_expected({name: values[0] for name, values in answer.items()}, hybrid_outputs(m3, UNICODE, 512))
    assert "is empty" in str(refused)


def test_checkpoint_stays_dense_without_the_task(m3: Path) -> None:
    dense, hybrid = (resolve(make_spec(model=str(m3), **task)) for task in ({}, {"task": "hybrid-embedding"}))
    assert dense.task.name == "sentence-similarity"
    assert dense.weights_sha256 != hybrid.weights_sha256


def test_pickled_heads_are_refused_with_a_command_that_converts(
    m3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(m3, tmp_path / "pickled"))
    for name in ("sparse_linear", "colbert_linear"):
        torch.save(load_file(folder / f"{name}.safetensors"), folder / f"{name}.pt")
        (folder / f"{name}.safetensors").unlink()
    spec = make_spec(model=str(folder), task="hybrid-embedding")
    with pytest.raises(CheckpointError, match="no sparse_linear") as refused:
        resolve(spec)
    assert CONVERT in str(refused.value)
    monkeypatch.chdir(folder)
    exec(CONVERT.removeprefix('python -c "').removesuffix('"'), {})
    assert encoder_task(resolve(spec).task).parameters(resolve(spec))["vector_size"] == 24


def test_invalid_heads_and_poolings_are_refused(m3: Path, tmp_path: Path) -> None:
    spec = {"task": "hybrid-embedding"}
    pooled = resolve(make_spec(model=str(m3), pooling="mean", **spec))
    with pytest.raises(CheckpointError, match="leave it out"):
        encoder_task(pooled.task).parameters(pooled)
    folder = Path(shutil.copytree(m3, tmp_path / "copy"))
    save_file(torch.nn.Linear(32, 2).state_dict(), folder / "sparse_linear.safetensors")
    resolved = resolve(make_spec(model=str(folder), **spec))
    with pytest.raises(CheckpointError, match=r"expected the weight \[1, 32\]"):
        encoder_task(resolved.task).parameters(resolved)
    (folder / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"no modules\.json with a Pooling"):
        resolve(make_spec(model=str(folder), **spec))

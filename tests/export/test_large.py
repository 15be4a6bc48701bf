"""Weights too large for one protobuf file, with the limit lowered to the size of a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.pipeline import build
from builder.runtime.generation.service import Service
from builder.serve.client import Client
from builder.serve.triton import running
from builder.spec import make_spec
from builder.triton.check import check
from tests.decoders import make_decoder_checkpoint
from tests.seq2seqs import make_seq2seq_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int8-static"])
def test_weights_beside_the_graph(
    precision: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built, published with both files hashed, and answered from by a real Triton. The cache has the export too, by
    another name of the same file."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builder.onnx.graph.EXTERNAL_FROM", 10_000)
    monkeypatch.setattr("builder.optimise.quantisation.EXTERNAL_FROM", 10_000)
    output = tmp_path / "model_repository"
    build(
        make_spec(
            model=str(checkpoint("pooled")), name="m", pooling="cls", precision=precision, quality=0.5, output=output
        )
    )
    files = json.loads((output / "m" / "build.json").read_text())["files"]["m"]
    assert {"1/model.onnx", "1/model.onnx.data"} <= set(files)
    weights = (output / "m" / "1" / "model.onnx.data").stat().st_size
    parameters = (checkpoint("pooled") / "model.safetensors").stat().st_size
    assert 10_000 < weights < 1.2 * parameters, "once, not twice"
    assert check(output) == []
    with running(output) as server, Client(server.url, "m") as client:
        assert len(client.ask({"text_input": "A fox."})["embedding"]) == 32


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-weights"])
def test_weights_beside_a_decoder(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph and its weights both lie in the generating model, and the emitted code runs from there."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builder.onnx.graph.EXTERNAL_FROM", 10_000)
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", "gpt2")
    options = {"precision": precision, "quality": 0.0, "perplexity": 100.0, "slots": 2}
    output = tmp_path / "model_repository"
    build(make_spec(model=str(checkpoint), name="m", output=output, **options))
    assert {"model.onnx", "model.onnx.data"} <= {path.name for path in (output / "m" / "1").iterdir()}
    assert check(output) == []
    service = Service(output / "m" / "1")
    answers: list[Any] = []
    request = {"text_input": np.array([b"A fox"], np.object_), "max_tokens": np.array([5])}
    service.submit(request, {}, lambda answer, last: answers.append(answer))
    service.engine.run_until_idle()
    assert answers[0]["completion_tokens"].tolist() == [5]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_encoder_and_a_decoder_read_one_table(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies beside both graphs of the generating model, and the emitted code runs from there."""
    monkeypatch.setattr("builder.onnx.shared_tables.LEAST", 1_000)
    checkpoint = make_seq2seq_checkpoint(tmp_path / "checkpoint", "t5")
    kept = {"precision": precision, "quality": 0.0, "perplexity": 100.0}
    options = {"task": "summarization", "slots": 4, "max_length": 96, "max_answer": 40, **kept}
    output = tmp_path / "model_repository"
    build(make_spec(model=str(checkpoint), name="m", output=output, **options))
    assert {"model.onnx", "encoder.onnx", "shared.data"} <= {path.name for path in (output / "m" / "1").iterdir()}
    assert check(output) == []
    service = Service(output / "m" / "1")
    answers: list[Any] = []
    request = {"text_input": np.array([b"A fox"], np.object_), "max_tokens": np.array([5])}
    service.submit(request, {}, lambda answer, last: answers.append(answer))
    service.engine.run_until_idle()
    assert 1 <= answers[0]["completion_tokens"].item() <= 5

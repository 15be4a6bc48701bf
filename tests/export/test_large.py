"""Weights too large for one protobuf file, with the limit lowered to the size of a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.repository.check import check
from builder.serve.client import Client
from builder.serve.triton import running
from builder.spec import make_spec
from builder.stages import build


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_weights_beside_the_graph(
    precision: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built, published with both files hashed, and answered from by a real Triton."""
    monkeypatch.setattr("builder.export.graph.EXTERNAL_FROM", 10_000)
    monkeypatch.setattr("builder.optimise.quantisation.EXTERNAL_FROM", 10_000)
    output = tmp_path / "model_repository"
    build(
        make_spec(
            model=str(checkpoint("pooled")), name="m", pooling="cls", precision=precision, quality=0.5, output=output
        )
    )
    files = json.loads((output / "m" / "build.json").read_text())["files"]["m_model"]
    assert {"1/model.onnx", "1/model.onnx.data"} <= set(files)
    weights = (output / "m_model" / "1" / "model.onnx.data").stat().st_size
    parameters = (checkpoint("pooled") / "model.safetensors").stat().st_size
    assert 10_000 < weights < 1.2 * parameters, "once, not twice"
    assert check(output) == []
    with running(output) as server, Client(server.url, "m") as client:
        assert len(client.ask({"text_input": "A fox."})["embedding"]) == 32

"""Weights too large for one protobuf file, with the limit lowered to the size of a test.

Builds share a cache: a build reads an earlier export through a hard link.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.building.pipeline import build
from builder.options import make_spec
from builder.repository.check import check
from builder.runtime.generation.service import Service
from builder.serving.client.client import Client
from builder.serving.server.triton import running
from tests.decoders import make_decoder_checkpoint
from tests.seq2seqs import make_seq2seq_checkpoint

ENCODERS = {"m-fp32": "fp32", "m-int8": "int8", "m-static": "int8-static"}
LENIENT = {"quality": 0.0, "perplexity": 100.0}


@pytest.fixture(scope="module", autouse=True)
def _cached(module_folder: Callable[[str], Path]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILD_REPO_CACHE", str(module_folder("cache")))
        yield


@pytest.fixture(scope="module")
def encoders(checkpoint: Callable[[str], Path], module_folder: Callable[[str], Path]) -> Path:
    """Build a repository of one encoder in several precisions."""
    model, output = str(checkpoint("pooled")), module_folder("encoders") / "model_repository"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 10_000)
        for name, precision in ENCODERS.items():
            build(make_spec(model=model, name=name, pooling="cls", precision=precision, quality=0.5, output=output))
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_large_encoder_has_its_weights_beside_the_graph(
    name: str, encoders: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Both files are published and hashed."""
    files = json.loads((encoders / name / "build.json").read_text())["files"][name]
    assert {"1/model.onnx", "1/model.onnx.data"} <= set(files)
    weights = (encoders / name / "1" / "model.onnx.data").stat().st_size
    parameters = (checkpoint("pooled") / "model.safetensors").stat().st_size
    assert 10_000 < weights < 1.2 * parameters, "once, not twice"


@pytest.mark.slow
def test_triton_answers_from_weights_beside_the_graph(encoders: Path) -> None:
    assert check(encoders) == []
    with running(encoders) as server:
        for name in ENCODERS:
            with Client(server.url, name) as client:
                assert len(client.ask({"text_input": "A fox."})["embedding"]) == 32


@pytest.fixture(scope="module")
def gpt2(module_folder: Callable[[str], Path]) -> Path:
    return make_decoder_checkpoint(module_folder("gpt2") / "checkpoint", "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-weights"])
def test_large_decoder_has_its_weights_beside_the_graph(
    precision: str, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph and its weights are both in the generating model, and the emitted code runs from there."""
    monkeypatch.setattr("builder.graphs.onnx.graph.EXTERNAL_FROM", 10_000)
    version = _built(gpt2, tmp_path / "model_repository", precision=precision, slots=2)
    assert {"model.onnx", "model.onnx.data"} <= {path.name for path in version.iterdir()}
    assert _answered(version) == 5


@pytest.fixture(scope="module")
def t5(module_folder: Callable[[str], Path]) -> Path:
    return make_seq2seq_checkpoint(module_folder("t5") / "checkpoint", "t5")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_encoder_and_decoder_read_one_table(
    precision: str, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is stored beside both graphs of the generating model, and the emitted code runs from there."""
    monkeypatch.setattr("builder.graphs.onnx.shared_tables.MIN_TABLE_BYTES", 1_000)
    options = {"task": "summarization", "slots": 4, "max_length": 96, "max_answer": 40}
    version = _built(t5, tmp_path / "model_repository", precision=precision, **options)
    assert {"model.onnx", "encoder.onnx", "shared.data"} <= {path.name for path in version.iterdir()}
    assert 1 <= _answered(version) <= 5


def _built(checkpoint: Path, output: Path, **options: Any) -> Path:
    """Build a generating model without a limit on its quality; return its version folder."""
    build(make_spec(model=str(checkpoint), name="m", output=output, **LENIENT, **options))
    assert check(output) == []
    return output / "m" / "1"


def _answered(version: Path) -> int:
    """Return the number of tokens that the emitted code generates, at most five."""
    service, answers = Service(version), list[Any]()
    request = {"text_input": np.array([b"A fox"], np.object_), "max_tokens": np.array([5])}
    service.submit(request, {}, lambda answer, last: answers.append(answer))
    service.loop.run_until_idle()
    return int(answers[0]["completion_tokens"].item())

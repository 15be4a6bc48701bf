"""`scripts/bench gpu` without a GPU: it is refused, and its sides run on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import GPT2Config

from builder.engines.gpu import gpus
from scripts.benchmarks import gpu
from scripts.benchmarks.posts import median_ms
from tests.decoders import make_decoder
from tests.tiny_encoders import make_checkpoint


@pytest.mark.skipif(bool(gpus()), reason="a GPU is here: it would be measured")
def test_gpu_benchmark_without_a_gpu_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--output", str(tmp_path / "figures.json")])
    with pytest.raises(SystemExit, match=r"no NVIDIA GPU here .* nothing was measured"):
        gpu.main()
    assert not (tmp_path / "figures.json").exists()


def test_gpu_benchmark_runs_every_side_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small models of the same architectures."""
    bert = make_checkpoint(tmp_path / "bert", "bert", "feature-extraction", vocab_size=20_000)
    monkeypatch.setattr(gpu, "minilm", lambda: bert)
    monkeypatch.setattr(gpu, "_gpt2", lambda: make_decoder("gpt2", vocab_size=GPT2Config().vocab_size))
    monkeypatch.setattr(gpu, "CONTEXT", 16)
    monkeypatch.setattr(gpu, "median_ms", partial(median_ms, seconds=0))
    encoders = {"PyTorch": gpu.encode_pytorch("cpu", ((1, 16),)), "ours": gpu.encode("cpu", tmp_path, ((1, 16),))}
    assert all(times["1x16"] > 0 for times in encoders.values())
    assert [column.header for column in gpu._table("title", encoders).columns] == ["", "1x16"]
    assert set(gpu.decode("cpu", tmp_path, "int4-weights", True, (1, 2))) == {"1", "2"}

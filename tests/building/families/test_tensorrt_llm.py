"""Repositories for TensorRT-LLM's Triton model, with a stand-in for TensorRT-LLM, which is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.building.pipeline import build
from builder.cli import main
from builder.common.errors import SpecError
from builder.options import make_spec
from builder.repository.check import check
from builder.repository.config.render import parse
from builder.serving.client.client import Client
from builder.serving.server import triton
from builder.serving.server.triton import running
from tests.decoders import make_decoder_checkpoint

TEMPLATE = """
import helpers
from dataclasses import dataclass

@dataclass
class RequestData:
    number: int

class TritonPythonModel:
    answer = helpers.ANSWER
"""

# Implements the requests of its template; a request with the id of a stream and the input `stop` ends the stream.
STAND_IN = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def initialize(self, args):
        self.running = {}

    def execute(self, requests):
        for request in requests:
            sender, name = request.get_response_sender(), request.request_id()
            if said(request, "stop"):
                if name in self.running:
                    self.running.pop(name).set()
                error = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                continue
            ended = self.running.setdefault(name, threading.Event())
            if not said(request, "streaming"):
                ended.set()
            threading.Thread(target=say, args=(sender, ended)).start()

def said(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and bool(tensor.as_numpy().item())

def say(sender, ended):
    while not ended.wait(0.02):
        sender.send(pb_utils.InferenceResponse([text()]))
    sender.send(pb_utils.InferenceResponse([text()]), flags=FINAL)

def text():
    return pb_utils.Tensor("text_output", np.array([b"a word"], dtype=object))
"""


@pytest.fixture(scope="module")
def checkpoint(module_folder: Callable[[str], Path]) -> Path:
    return make_decoder_checkpoint(module_folder("tensorrt_llm") / "writer", "llama")


def _build(checkpoint: Path, output: Path, **options: Any) -> dict[str, Any]:
    build(make_spec(model=str(checkpoint), output=output, engine="tensorrt-llm", **options))
    document: dict[str, Any] = yaml.safe_load((output / "writer" / "1" / "model.yaml").read_text())
    return document


def test_tensorrt_llm_entry_equals_its_template(checkpoint: Path, tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "free_gpu_memory_fraction": 0.8}
    document = _build(checkpoint, tmp_path, precision="bf16", tensorrt_llm=sizes, max_length=64, slots=32)
    assert document == {
        "model": "/models/writer/1/checkpoint",
        "backend": "pytorch",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8},
        "max_seq_len": 64,
        "max_batch_size": 32,
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }
    config = parse((tmp_path / "writer" / "config.pbtxt").read_text(), "writer")
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert config.model_transaction_policy.decoupled
    assert config.HasField("dynamic_batching")
    required = [value.name for value in config.input if not value.optional]
    assert required == ["text_input"]
    assert {"streaming", "sampling_param_max_tokens", "stop"} <= {value.name for value in config.input}
    assert check(tmp_path) == []


def test_tensorrt_llm_check_finds_missing_checkpoint_and_wrong_server(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _build(checkpoint, tmp_path)
    assert main(["serve", str(tmp_path)]) == 1
    assert "the embedded Triton has no TensorRT-LLM; serve it in the trtllm-python-py3 container" in (
        capsys.readouterr().err
    )
    (tmp_path / "writer" / "1" / "checkpoint" / "config.json").unlink()
    assert any("names /models/writer/1/checkpoint, which is not there" in problem for problem in check(tmp_path))


def test_tensorrt_llm_model_fails_outside_its_container(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build(checkpoint, tmp_path / "r")
    emitted = tmp_path / "r" / "writer" / "1" / "model.py"
    with pytest.raises(RuntimeError, match=r"runs in the trtllm-python-py3 container"):
        _load(emitted.read_text(), tmp_path)
    template = tmp_path / "template"
    template.mkdir()
    (template / "model.py").write_text(TEMPLATE)
    (template / "helpers.py").write_text("ANSWER = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("helpers", "tensorrt_llm_template"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    there = emitted.read_text().replace("/app/all_models/llmapi/tensorrt_llm/1", str(template))
    assert _load(there, tmp_path).TritonPythonModel.answer == 42
    for name in ("helpers", "tensorrt_llm_template"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_tensorrt_llm_answers_whole_and_cancels_streams(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model ends abandoned streams, because Triton leaks a stream that is cancelled at the wrong moment."""
    monkeypatch.setattr(triton, "IDLE_REPORTS", 1000)  # wait for its Python process to end
    _build(checkpoint, tmp_path / "model_repository")
    version = tmp_path / "model_repository" / "writer" / "1"
    (version / "model.yaml").unlink()
    (version / "model.py").write_text(STAND_IN)
    with running(tmp_path / "model_repository") as server, Client(server.url, "writer") as client:
        assert client.ask({"text_input": "a"})["text_output"] == ["a word"]
        answers = client.stream({"text_input": "a", "streaming": True})
        assert next(answers)["text_output"] == ["a word"]
        answers.close()  # type: ignore[attr-defined]
    assert any("successfully unloaded 'writer'" in line for line in server.log)


def _load(source: str, folder: Path) -> Any:
    (folder / "emitted.py").write_text(source)
    spec = importlib.util.spec_from_file_location("emitted_for_tensorrt_llm", folder / "emitted.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triton": "24.10"}, r"needs --triton 25\.05 or later"),
        ({"precision": "fp8"}, "has fp32, fp16, bf16, not --precision fp8"),
        ({"prune": 0.3}, "--prune cannot be used with --engine tensorrt-llm"),
        ({"instances": 2}, r"--instances \(use tensorrt_llm\.tensor_parallel_size\)"),
        ({"gpu": "t4"}, r"needs compute capability 8\.0 \(TensorRT-LLM"),
        ({"target": "cpu"}, "--target cpu has no --engine tensorrt-llm"),
        ({"vllm": {"tensor_parallel_size": 2}}, "`vllm:` is for --engine vllm"),
    ],
)
def test_tensorrt_llm_refuses_options_it_lacks(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        _build(checkpoint, tmp_path, **options)

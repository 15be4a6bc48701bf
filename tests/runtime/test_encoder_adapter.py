"""The adapter of an encoder, with a stand-in for Triton's module, answers every accepted request."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builder.runtime.encoder.request_queue import RequestQueue

TRITON = "triton_python_backend_utils"
ON_TRITON = ("builder.runtime.encoder_model", "builder.runtime.encoder.transport", "builder.runtime.adapters")
PATIENCE_S = 300.0


class Sender:
    """Triton's response sender, which records a client's responses."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.done = threading.Event()

    def send(self, response: Any, flags: int) -> None:
        self.sent.append(response)
        self.done.set()


@dataclass
class Asked:
    """Request with one input; without a sender, getting one fails as in Triton."""

    text_input: np.ndarray
    sender: Sender | None = None

    def parameters(self) -> str:
        return "{}"

    def get_response_sender(self) -> Sender:
        if self.sender is None:
            raise RuntimeError("no sender")
        return self.sender


@dataclass
class TritonError:
    """Error of a response."""

    message: str
    code: str


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a TritonPythonModel with a front that echoes its input."""
    codes = {code: code for code in ("INVALID_ARG", "UNAVAILABLE", "INTERNAL")}
    triton = ModuleType(TRITON)
    for name, value in {
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": 1,
        "InferenceResponse": lambda tensors=None, error=None: SimpleNamespace(tensors=tensors, error=error),
        "Tensor": lambda name, array: array,
        "TritonError": type("TritonError", (TritonError,), codes),
        "get_input_tensor_by_name": lambda request, name: SimpleNamespace(as_numpy=lambda: getattr(request, name)),
        "Logger": SimpleNamespace(log_error=lambda text: None, log_verbose=lambda text: None),
    }.items():
        setattr(triton, name, value)
    monkeypatch.setitem(sys.modules, TRITON, triton)
    for name in ON_TRITON:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(ON_TRITON[0])
    model = object.__new__(module.TritonPythonModel)
    model.inputs, model.front = ["text_input"], _Echo()
    model.metrics = SimpleNamespace(due=lambda: False)
    model.queue = RequestQueue(8, PATIENCE_S, 4, model._answer_queued, module._refuse, module._is_disconnected)
    yield model
    model.finalize()
    for name in ON_TRITON:
        sys.modules.pop(name, None)


class _Echo:
    counts = None

    def __call__(self, requests: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        return [{"text_output": tensors["text_input"]} for tensors in requests]


def test_adapter_fails_a_request_that_cannot_be_queued_alone(adapter: Any) -> None:
    """If execute() raised, Triton would answer the accepted requests a second time."""
    text, sender = np.ones((3, 1)), Sender()
    taken, failed = adapter.execute([Asked(text, sender), Asked(text)])
    assert taken is None
    assert (failed.error.code, "no sender" in failed.error.message) == ("INTERNAL", True)
    assert sender.done.wait(PATIENCE_S)
    assert sender.sent[0].error is None
    assert (sender.sent[0].tensors[0] == text).all()


def test_adapter_answers_a_batch_that_cannot_be_read(adapter: Any) -> None:
    """Regression: execute() raised, and Triton never ended the process of the unloaded model."""
    (answered,) = adapter.execute([object()])
    assert (answered.error.code, "no attribute" in answered.error.message) == ("INTERNAL", True)


def test_adapter_is_not_ready_after_a_request_went_unanswered(adapter: Any) -> None:
    """Triton calls it since release 26.03, and accepts only a bool."""
    assert adapter.is_ready() is True
    adapter.queue.failure = "BrokenPipeError: gone"
    assert adapter.is_ready() is False
    answered = adapter.execute([Asked(np.ones((4, 1)))])
    assert answered[0].error is None, "where it came"

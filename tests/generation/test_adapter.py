"""The adapter of a generating model, with a stand-in for Triton's module."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from builder.runtime.fields import InputError
from builder.runtime.generation.scheduler import QueueFull

ON_TRITON = ("builder.runtime.generation_model", "builder.runtime.adapters")


class Sender:
    """Triton's response sender: it records responses, and whether the client has disconnected."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.last = threading.Event()

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None:
            self.sent.append(response)
        if flags:
            self.last.set()

    def is_cancelled(self) -> bool:
        return False


@dataclass
class TritonError:
    """Error of a response."""

    message: str
    code: str


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a TritonPythonModel without a model: a test sets its service."""
    codes = {code: code for code in ("INVALID_ARG", "CANCELLED", "UNAVAILABLE", "INTERNAL")}
    triton = ModuleType("triton_python_backend_utils")
    for name, value in {
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": 1,
        "InferenceResponse": SimpleNamespace,
        "TritonError": type("TritonError", (TritonError,), codes),
        "get_input_tensor_by_name": lambda request, name: None,
        "Logger": SimpleNamespace(log_error=lambda text: None, log_verbose=lambda text: None),
    }.items():
        setattr(triton, name, value)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    for name in ON_TRITON:
        sys.modules.pop(name, None)
    module = importlib.import_module(ON_TRITON[0])
    model = object.__new__(module.TritonPythonModel)
    model.inputs, model.open, model.lock, model.batched = [], {}, threading.Lock(), False
    model.outbox = module.queue.SimpleQueue()
    yield model
    for name in ON_TRITON:
        sys.modules.pop(name, None)


def _asked(sender: Sender, name: str = "", parameters: str = "{}") -> Any:
    return SimpleNamespace(
        get_response_sender=lambda: sender,
        parameters=lambda: parameters,
        request_id=lambda: name,
        timeout=lambda: 0,
    )


def test_adapter_reads_a_slow_request_without_delaying_others(adapter: Any) -> None:
    reading, read, request = threading.Event(), threading.Event(), SimpleNamespace(active=True)

    def prepare(*arguments: Any) -> list[Any]:
        reading.set()
        assert read.wait(300)
        return [SimpleNamespace(request=request)]

    adapter.service = SimpleNamespace(prepare=prepare, start=lambda prepared: None)
    sender = Sender()
    asking = threading.Thread(target=adapter.execute, args=([_asked(sender)],))
    asking.start()
    assert reading.wait(300)
    try:
        assert adapter.lock.acquire(timeout=60), "answers to others wait for a text that is being tokenised"
        adapter.lock.release()
    finally:
        read.set()
        asking.join()
    assert adapter.open == {sender: ("", request)}


def test_adapter_answers_after_a_panic(adapter: Any) -> None:
    """Regression: execute() raised the panic, and Triton never ended the process of the unloaded model."""

    class PanicException(BaseException): ...

    def prepare(*arguments: Any) -> list[Any]:
        raise PanicException("byte index 1 is not a char boundary")

    adapter.service = SimpleNamespace(prepare=prepare)
    senders = [Sender(), Sender()]
    adapter.execute([_asked(sender) for sender in senders])
    assert all(sender.last.is_set() for sender in senders)
    assert [sender.sent[0].error.code for sender in senders] == ["INTERNAL"] * 2
    assert "PanicException: byte index 1" in senders[0].sent[0].error.message


def test_adapter_cancels_the_request_that_another_names(adapter: Any) -> None:
    """Cancelling an answered request is not an error, because the client cannot know it was answered."""

    class FakeRequest:
        """Request that runs until it is cancelled, which is possible once."""

        active = True

        def cancel(self) -> bool:
            was, self.active = self.active, False
            return was

    requests = {name: FakeRequest() for name in ("a", "b")}
    adapter.open = {Sender(): (name, request) for name, request in requests.items()}
    ends = [Sender() for _ in range(3)]
    adapter.execute([_asked(sender, f"{sender}", '{"cancel": "a"}') for sender in ends[:2]])
    empty = '{"cancel": "gone", "triton_enable_empty_final_response": true}'
    adapter.execute([_asked(ends[2], "c", empty)])
    assert {name: request.active for name, request in requests.items()} == {"a": False, "b": True}
    (ended,) = [sender for sender, (name, _) in adapter.open.items() if name == "a"]
    adapter.outbox.get_nowait()()
    (response,) = ended.sent
    assert (response.error.message, response.error.code) == ("the request was cancelled", "CANCELLED")
    assert ended.last.is_set()
    assert adapter.outbox.empty(), "it is told once"
    assert all(end.last.is_set() and not end.sent for end in ends)


@pytest.mark.parametrize(
    ("parameters", "inputs", "result"),
    [
        ('{"cancel": ""}', (), "cancel is ''"),
        ('{"cancel": false}', (), "cancel is False"),
        ('{"cancel": 7}', (), "cancel is 7"),
        ('{"cancel": "a", "max_tokens": 5}', (), "max_tokens"),
        ('{"cancel": "a"}', ("stream", "text_input"), "text_input"),
    ],
)
def test_cancel_request_needs_an_id_and_nothing_else(
    parameters: str, inputs: tuple[str, ...], result: str, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.inputs = ["text_input", "stream"]
    monkeypatch.setattr(
        sys.modules["triton_python_backend_utils"],
        "get_input_tensor_by_name",
        lambda request, name: SimpleNamespace() if name in inputs else None,
    )
    others = {name: SimpleNamespace(active=True, cancel=lambda: pytest.fail("it runs on")) for name in ("", "a")}
    adapter.open = {Sender(): (name, request) for name, request in others.items()}
    sender = Sender()
    adapter.execute([_asked(sender, "c", parameters)])
    (response,) = sender.sent
    assert response.error.code == "INVALID_ARG"
    assert result in response.error.message
    assert sender.last.is_set()


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("2 wait"), "UNAVAILABLE"), (InputError("is empty"), "INVALID_ARG")]
)
def test_adapter_forgets_a_request_that_is_refused_on_submission(adapter: Any, error: Exception, code: str) -> None:
    def refuse(*arguments: Any) -> Any:
        raise error

    prepared = [SimpleNamespace(request=SimpleNamespace(active=True))]
    prepare = refuse if code == "INVALID_ARG" else lambda *arguments: prepared
    adapter.service = SimpleNamespace(prepare=prepare, start=refuse)
    sender = Sender()
    adapter.execute([_asked(sender)])
    (response,) = sender.sent
    assert (response.error.code, response.error.message) == (code, str(error))
    assert sender.last.is_set()
    assert adapter.open == {}


def test_adapter_checks_a_few_connections_each_round(adapter: Any) -> None:
    """Each check is a message to the server; hundreds of streams would send thousands a second."""
    asked: list[int] = []

    class FakeSender(Sender):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def is_cancelled(self) -> bool:
            asked.append(self.number)
            return self.number == 50

    class FakeRequest:
        active = True

        def cancel(self) -> bool:
            was, self.active = self.active, False
            return was

    requests = [FakeRequest() for _ in range(100)]
    adapter.open = {FakeSender(number): ("", request) for number, request in enumerate(requests)}
    at_once = sys.modules["builder.runtime.generation_model"].MAX_CONNECTION_CHECKS
    for turn in range(1, 6):
        adapter._cancel_disconnected()
        assert len(asked) <= turn * at_once
        if turn * at_once >= 100:
            break
    assert sorted(set(asked)) == list(range(100))
    assert [number for number, request in enumerate(requests) if not request.active] == [50]


def test_adapter_is_not_ready_after_the_decode_loop_failed(adapter: Any) -> None:
    """Triton calls it since release 26.03, and accepts only a bool."""
    loop = SimpleNamespace(failure=None)
    adapter.service = SimpleNamespace(loop=loop)
    assert adapter.is_ready() is True
    loop.failure = RuntimeError("the decode loop is gone")
    assert adapter.is_ready() is False


@pytest.mark.parametrize("error", [ZeroDivisionError(), BaseException("a panic")])
def test_adapter_sends_other_responses_after_one_fails(adapter: Any, error: BaseException) -> None:
    def fails() -> None:
        raise error

    sender = Sender()
    adapter.outbox.put(fails)
    adapter.outbox.put(lambda: adapter._respond(sender, InputError("no"), True))
    adapter.outbox.put(None)
    adapter._send()
    assert sender.last.is_set()

"""Stopping a real Triton: running requests are finished, and idle open connections are not waited for."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from builder.common.errors import ServeError
from builder.runtime.fields import Field
from builder.serving.client import responses
from builder.serving.client.client import Client
from builder.serving.client.responses import Responses
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import add_tensor
from builder.serving.gateway.triton import Triton
from builder.serving.server import triton
from builder.serving.server.triton import TritonServer, running

SAMPLE = {"text_input": "The museum", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def decoder(built: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy a repository of one generating model."""
    return Path(shutil.copytree(built("writes"), tmp_path / "model_repository"))


def test_streams_do_not_block_unloading_or_change_the_model(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: cancelling a completed stream leaked its request, for which the server waits at unloading.

    This happens if the cancellation crosses the last response. The model must not leave __pycache__ folders either.
    """
    monkeypatch.setattr(triton, "IDLE_REPORTS", 1000)  # wait for the model's Python process to end,
    monkeypatch.setattr(responses, "PATIENCE_S", 300.0)  # and for each request
    published = {path: path.read_bytes() for path in decoder.rglob("*") if path.is_file()}
    with running(decoder) as server:
        _all_at_once(lambda: _answered_and_refused(server.url))
        with Client(server.url, "writes") as client:
            _disconnect_when_complete(client)
            _disconnect_at_the_last_response(client)
        asyncio.run(_refused(server.url))
        asyncio.run(_disconnect(server.url))
    assert any("successfully unloaded 'writes'" in line for line in server.log)
    assert {path: path.read_bytes() for path in decoder.rglob("*") if path.is_file()} == published


def _all_at_once(ask: Callable[[], None]) -> None:
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answered_and_refused(url: str) -> None:
    with Client(url, "writes") as client:
        for _ in range(3):
            client.ask(SAMPLE)
            with pytest.raises(ServeError, match="temperature"):
                client.ask({**SAMPLE, "temperature": -1.0})


def _disconnect_when_complete(client: Client) -> None:
    for _ in range(3):
        answers = client.stream({**SAMPLE, "max_tokens": 5, "stream": True})
        next(answers)
        _wait_until_all_came()
        answers.close()  # type: ignore[attr-defined]


def _disconnect_at_the_last_response(client: Client) -> None:
    for turn in range(60):
        answers = client.stream({**SAMPLE, "max_tokens": 2 + turn % 4, "stream": True})
        for _ in range(1 + turn % 4):
            next(answers, None)
        answers.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model", "shape"), [("writes", (1,)), ("writes_one", (1, 1)), ("sums", (1,))])
def test_model_ends_the_request_of_an_abandoned_stream(
    model: str, shape: tuple[int, ...], server: TritonServer
) -> None:
    """Include a model with a batch dimension, for which Triton's backend refuses requests without tensors."""
    request = service_pb2.ModelInferRequest(model_name=model, id="left")
    for name, kind, value in (("text_input", "TYPE_STRING", "The museum"), ("stream", "TYPE_BOOL", True)):
        add_tensor(request, Field(name, kind), [value], shape)
    stream = Recorded(server.url, request, 60)
    next(iter(stream))
    stream.close()
    assert stream.errors in ([], ["the request was cancelled"]), "it was ended, or had been answered"


class Recorded(Responses):
    """Responses that record their errors."""

    def __init__(self, url: str, request: service_pb2.ModelInferRequest, timeout_s: float) -> None:
        self.errors: list[str] = []
        super().__init__(url, request, timeout_s)

    def _next(self, timeout_s: float) -> service_pb2.ModelStreamInferResponse | None:
        message = super()._next(timeout_s)
        if message is not None and message.error_message:
            self.errors.append(message.error_message)
        return message


async def _disconnect(url: str) -> None:
    """Open streams like the gateway, and disconnect from them."""
    triton = Triton(url)
    for turn in range(60):
        request = service_pb2.ModelInferRequest(model_name="writes")
        for name, kind, value in (
            ("text_input", "TYPE_STRING", "The museum"),
            ("max_tokens", "TYPE_INT32", 2 + turn % 4),
            ("ignore_eos", "TYPE_BOOL", True),
            ("stream", "TYPE_BOOL", True),
        ):
            add_tensor(request, Field(name, kind), [value], (1,))
        async with aclosing(triton.stream(request)) as answers:
            for _ in range(1 + turn % 4):
                await anext(answers, None)
    await triton.close()


def _wait_until_all_came() -> None:
    """Wait until the last response and the end of the stream have arrived, still unread."""
    end = time.monotonic() + 300
    while any(thread.name == "responses of writes" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.05)


async def _refused(url: str) -> None:
    """Open streams like the gateway, whose only response is an error."""
    triton = Triton(url)
    for _ in range(20):
        request = service_pb2.ModelInferRequest(model_name="writes")
        add_tensor(request, Field("text_input", "TYPE_STRING"), [""], (1, 1))
        with pytest.raises(ApiError):
            await anext(triton.stream(request))
    await triton.close()


def test_stop_finishes_running_answers_despite_open_streams(decoder: Path) -> None:
    with running(decoder) as server:
        client = Client(server.url, "writes")
        stream = client.stream({**SAMPLE, "stream": True})
        answers = [next(stream)]
    assert not any("Timeout 0:" in line for line in server.log), "it waited until its own timeout"
    answers += stream
    assert answers[-1]["completion_tokens"] == [100], "what ran when the server was stopped was finished"

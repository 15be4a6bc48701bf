"""Requests in a decode process that is killed, on a real Triton and for a gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from builder.common.tensors import to_tensors
from builder.serving.client.client import Client
from builder.serving.gateway import pending_calls, triton_stream
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.triton import Triton
from builder.serving.server.stubs import Stubs
from builder.serving.server.triton import TritonServer, running
from builder.serving.server.watch import Watcher
from tests.served.adapters import put_held
from tests.served.patience import comes_about

NAME = "writes"
SAMPLE = {"text_input": "The museum in Oslo", "max_tokens": 24, "ignore_eos": True}


def test_killed_process_ends_its_stream_and_retries_whole_answers(
    built: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a separate server and kill it: Triton never answers these requests and would wait for them."""
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(pending_calls, "SILENT_STREAM_LOST_AFTER_S", 0.1)
    monkeypatch.setattr(pending_calls, "UNSTARTED_STREAM_LOST_AFTER_S", 3600.0)  # until the next process runs
    monkeypatch.setattr(triton_stream, "PATIENCE_S", 0.1)
    repository, place = tmp_path / "model_repository", tmp_path / "place"
    place.mkdir()
    shutil.copytree(built(NAME), repository)
    put_held(repository / NAME, "decoder", place)
    with running(repository) as server:
        try:
            streamed, whole, broken = asyncio.run(_send_to_a_killed_process(server, place, monkeypatch))
            with Client(server.url, NAME) as client:
                (expected,) = client.ask(SAMPLE)["text_output"]
        finally:
            server.process.kill()
    assert whole == expected
    assert streamed
    assert expected.startswith(streamed)
    assert (broken.status, broken.code) == (503, "unavailable")
    assert f"{NAME} broke off in the midst of this answer: it was not ready meanwhile" in broken.message


async def _send_to_a_killed_process(
    server: TritonServer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str, ApiError]:
    """Return the text of a stream, the answer to a request without streaming, and the error that ended the stream."""
    triton, watcher = Triton(server.url), Watcher(server, lambda text: None)
    (place / "closed").touch()
    (place / "taken").touch()
    pieces = triton.stream(_request(server, stream=True))
    (first,) = (await anext(pieces))["text_output"].strings()
    more, whole = asyncio.ensure_future(anext(pieces)), asyncio.ensure_future(_text(triton, _request(server)))
    assert await asyncio.to_thread(comes_about, lambda: len((place / "taken").read_text().splitlines()) == 2)
    watcher.look()
    (process,) = [stub.pid for stub in Stubs(server.process.pid).find() if stub.model == NAME]
    os.kill(process, signal.SIGKILL)
    (place / "closed").unlink()

    def reloaded() -> bool:
        assert server.process.poll() is None, server.log[-20:]
        watcher.look()
        return watcher.reloads == {NAME: 1}

    assert await asyncio.to_thread(comes_about, reloaded)
    monkeypatch.setattr(pending_calls, "SILENT_STREAM_LOST_AFTER_S", 1.0)
    async with asyncio.timeout(300):
        with pytest.raises(ApiError) as broken:
            await more
    assert not whole.done(), "it had said nothing, and may be taken up by a version that answers what it has"
    monkeypatch.setattr(pending_calls, "UNSTARTED_STREAM_LOST_AFTER_S", 0.1)
    async with asyncio.timeout(300):
        text = await whole
    await triton.close()
    return first, text, broken.value


async def _text(triton: Triton, request: service_pb2.ModelInferRequest) -> str:
    return "".join([text async for outputs in triton.stream(request) for text in outputs["text_output"].strings()])


def _request(server: TritonServer, stream: bool = False) -> service_pb2.ModelInferRequest:
    with Client(server.url, NAME) as client:
        sample = {**SAMPLE, "stream": stream}
        return client._request(to_tensors(sample, client.signature.inputs, client.signature.batched))

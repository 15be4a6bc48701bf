"""Requests that wait in an encoder's front on a real Triton while a gate blocks its engine.

Each step waits for the state that it needs, so the tests do not depend on the machine's speed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from builder.checkpoints.distances import difference
from builder.common.samples import TEXTS
from builder.common.tensors import to_tensors, to_values
from builder.runtime.encoder.request_queue import CONNECTION_CHECK_S
from builder.serving.client.client import Client
from builder.serving.gateway import pending_calls
from builder.serving.gateway.triton import Triton
from builder.serving.server.stubs import Stubs
from builder.serving.server.triton import TritonServer, running
from builder.serving.server.watch import Watcher
from tests.served.adapters import held_files, put_held
from tests.served.guests import guest
from tests.served.patience import comes_about

NAME, OF, ROWS = "held", "topics", 40  # rows: more than half of a batch of 64, so that no two requests share one
SAMPLE = {"text_input": TEXTS[5], "top_k": 3}


@dataclass(frozen=True)
class Held:
    """Front with a gate before its engine in the folder `place`. `stub`: gRPC stub of its server."""

    served: Client
    stub: Any
    place: Path

    def close(self) -> None:
        (self.place / "closed").touch()
        (self.place / "calls").unlink(missing_ok=True)

    def open(self) -> None:
        (self.place / "closed").unlink(missing_ok=True)

    def request(self) -> service_pb2.ModelInferRequest:
        """Return a request with so many rows that no two requests share a batch."""
        tensors = to_tensors(SAMPLE, self.served.signature.inputs)
        return self.served._request({name: np.repeat(array, ROWS, axis=0) for name, array in tensors.items()})

    def send(self, count: int) -> list[Any]:
        """Send that many requests at once."""
        return [self.stub.ModelInfer.future(self.request(), timeout=300) for _ in range(count)]

    def holds(self) -> list[dict[str, int]]:
        """Return for each of its processes the requests, and how many of their clients disconnected."""
        return [json.loads(file.read_text()) for file in sorted(self.place.glob("*.json"))]

    def has(self, requests: int, left: int = 0) -> bool:
        """Return whether the front comes to hold that many requests altogether."""
        wanted = {"requests": requests, "left": left}
        return comes_about(lambda: {key: sum(one[key] for one in self.holds()) for key in wanted} == wanted)

    def answered(self, futures: Sequence[Any]) -> int:
        """Return how many were answered; check their answers."""
        answers = [InferResult(future.result()) for future in futures if future.exception() is None]
        expected = [self.served.ask(SAMPLE)] * ROWS
        for answer in answers:
            arrays = {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}
            error, where = difference(expected, to_values(arrays, self.served.signature.outputs))
            assert error < 1e-5, where
        return len(answers)


@pytest.fixture
def held(server: TritonServer, built: Callable[[str], Path], tmp_path: Path) -> Callable[..., Any]:
    """Run a front of `instances`, with the given limits, on the server that all tests share."""
    entry = built(OF) / OF

    @contextmanager
    def held(instances: int = 1, **limits: int) -> Iterator[Held]:
        parameters = {"place": str(tmp_path)}
        with (
            guest(server, entry, NAME, held_files(entry / "1", "model"), parameters, instances, **limits),
            Client(server.url, NAME) as served,
            grpc.insecure_channel(server.url) as channel,
        ):
            front = Held(served, service_pb2_grpc.GRPCInferenceServiceStub(channel), tmp_path)
            try:
                assert comes_about(lambda: len(front.holds()) == instances)
                front.close()
                yield front
            finally:
                front.open()

    return held


def test_queue_timeout_refuses_waiting_requests(held: Callable[..., Any]) -> None:
    with held(queue=8, queue_timeout_ms=1500) as front:  # longer than the start of a busy thread takes
        requests = front.send(5)
        assert front.has(requests=5)
        time.sleep(1.6)
        front.open()
        assert front.answered(requests) == 1, "the one that the engine had when the time of the others was over"
        late = [future for future in requests if future.exception() is not None]
        assert {future.code() for future in late} == {grpc.StatusCode.UNAVAILABLE}
        assert all("time was over" in future.details() and "may for 1.5 s" in future.details() for future in late)
        assert _rows(front) == ROWS + 1, "of it, and of what was asked to compare"
        assert front.answered(front.send(1)) == 1, "it goes on as before"


def test_two_instances_share_the_queue_limit(held: Callable[..., Any]) -> None:
    """Four requests wait, two for each process, besides those in the engines. Later requests are refused at once."""
    with held(instances=2, queue=4, queue_timeout_ms=60_000) as front:
        requests = front.send(12)
        assert comes_about(lambda: sum(one["requests"] for one in front.holds()) + _done(requests) == len(requests))
        assert max(one["requests"] for one in front.holds()) <= 1 + 4 // 2
        refused = [future for future in requests if future.done()]
        assert len(refused) >= 6
        assert {future.code() for future in refused} == {grpc.StatusCode.UNAVAILABLE}
        assert all("2 requests wait already and the limit is 2" in future.details() for future in refused)
        front.open()
        assert front.answered(requests) == len(requests) - len(refused)


def test_abandoned_requests_never_reach_the_engine(held: Callable[..., Any]) -> None:
    """The model can be unloaded afterwards, so no request leaked: Triton waits for each request of a model."""
    with held(queue=8, queue_timeout_ms=0) as front:
        first = front.send(1)
        assert front.has(requests=1)
        others = front.send(4)
        assert front.has(requests=5)
        abandoned, staying = others[:3], others[3:]
        for future in abandoned:
            future.cancel()
        assert front.has(requests=5, left=3)
        time.sleep(CONNECTION_CHECK_S + 0.1)
        front.open()
        assert front.answered([*first, *staying]) == 2
        assert _rows(front) == 2 * ROWS + 1, "of these two, and of what was asked to compare"
        assert front.has(requests=0)


def test_gateway_resends_requests_of_a_killed_front_process(
    built: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a separate server and kill it: Triton never answers these requests and would wait for them."""
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(pending_calls, "LOST_AFTER_S", 3600.0)  # until the next process runs
    monkeypatch.setattr(pending_calls, "ABANDONED_TIMEOUT_S", 0.05)
    repository, place = tmp_path / "model_repository", tmp_path / "place"
    place.mkdir()
    shutil.copytree(built(OF), repository)
    put_held(repository / OF, "model", place)
    with running(repository) as server:
        try:
            with Client(server.url, OF) as served:
                held = Held(served, None, place)
                scores = asyncio.run(_send_to_a_killed_process(server, held, monkeypatch))
                expected = served.ask(SAMPLE)["score"]
        finally:
            server.process.kill()
    np.testing.assert_allclose(scores, [expected] * 3, atol=1e-5)


async def _send_to_a_killed_process(server: TritonServer, held: Held, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the scores of three requests whose process is killed."""
    triton, watcher = Triton(server.url), Watcher(server, lambda text: None)
    held.close()
    asked = [asyncio.ensure_future(triton.infer(held.request())) for _ in range(3)]
    assert await asyncio.to_thread(held.has, requests=3)
    watcher.look()
    (process,) = [stub.pid for stub in Stubs(server.process.pid).find() if stub.model == OF]
    os.kill(process, signal.SIGKILL)
    held.open()

    def reloaded() -> bool:
        watcher.look()
        return watcher.reloads == {OF: 1}

    assert await asyncio.to_thread(comes_about, reloaded)
    assert not any(task.done() for task in asked)
    monkeypatch.setattr(pending_calls, "LOST_AFTER_S", 0.1)
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*asked)
    await triton.close()
    return [answer["score"].array()[0] for answer in answers]


def _done(futures: Sequence[Any]) -> int:
    return sum(future.done() for future in futures)


def _rows(front: Held) -> int:
    """Return the number of rows that the engine received since the gate was closed."""
    return sum(map(int, (front.place / "calls").read_text().split()))

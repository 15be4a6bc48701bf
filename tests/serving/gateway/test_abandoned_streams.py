"""Streams whose client disconnects or whose model loses them, as seen by their server, a small gRPC one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from builder.common.errors import ServeError
from builder.serving.client.responses import Responses
from builder.serving.gateway import pending_calls, triton_stream
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import LENGTH
from builder.serving.gateway.triton import Triton
from tests.serving.gateway.grpc_server import REQUEST, FakeGrpcServer, serving


class FakeStreams(FakeGrpcServer):
    """Model that says "1" and goes on for ever, unless it is asked for "once". `reaction`: to a request to end."""

    def __init__(self, reaction: str) -> None:
        super().__init__("2.51.0")
        self.reaction = reaction

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        running = ""
        try:
            async for request in requests:
                ends = request.parameters["cancel"].string_param or _stopped(request)
                if not ends:
                    running = "" if request.model_name == "once" else request.id
                    self.seen.append("asked")
                    self.requested.set()
                    yield _response(request, not running, "1")
                elif self.reaction == "ends":
                    self.seen.append("ended" if ends == running else f"{running} is not {ends}")
                    running = ""
                elif self.reaction.startswith("refuses"):
                    yield _response(request, False, error="unexpected inference input 'stop' for model 'for ever'")
            if running:
                await self.released.wait()
            self.seen.append("closed")
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        finally:
            self.ended.set()


def _stopped(request: service_pb2.ModelInferRequest) -> str:
    """Return the id of the TensorRT-LLM request to end: this request has the same id."""
    return str(request.id) if any(sent.name == "stop" for sent in request.inputs) else ""


def _response(
    request: service_pb2.ModelInferRequest, last: bool, text: str = "", error: str = ""
) -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelStreamInferResponse(error_message=error)
    response.infer_response.id = request.id
    if not error:
        response.infer_response.parameters["triton_final_response"].bool_param = last
        response.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.infer_response.raw_output_contents.append(LENGTH.pack(len(text)) + text.encode())
    return response


@pytest.mark.parametrize(
    ("reaction", "seen"),
    [
        ("ends", ["asked", "ended", "closed"]),
        ("refuses", ["asked", "cancelled"]),
        ("refuses TensorRT-LLM's", ["asked", "cancelled"]),
        ("ignores", ["asked", "cancelled"]),
    ],
)
async def test_abandoned_stream_is_cancelled_only_if_the_model_cannot_end_it(
    reaction: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_stream, "PATIENCE_S", 0.1 if reaction == "ignores" else 3600.0)
    async with serving(FakeStreams(reaction)) as (fake, triton):
        reading = asyncio.ensure_future(read(triton, streaming="TensorRT-LLM" in reaction))
        await fake.requested.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(60):
            await fake.ended.wait()
        assert fake.seen == seen


async def test_stream_is_closed_after_its_last_response() -> None:
    async with serving(FakeStreams("ends")) as (fake, triton):
        texts = await read(triton, "once")
        await fake.ended.wait()
        assert (texts, fake.seen) == (["1"], ["asked", "closed"])


class FakeDyingStreams(FakeStreams):
    """Server whose process dies of the first `deaths` requests, after `pieces` of its answer.

    At two looks after each its model is not ready, and then it is.
    """

    def __init__(self, deaths: int, pieces: int) -> None:
        super().__init__("ends")
        self.deaths, self.pieces, self.away = deaths, pieces, 0

    async def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelReadyResponse:
        self.ready = not self.away
        self.away = max(0, self.away - 1)
        return await super().ModelReady(request, context)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        async for request in requests:
            if request.parameters["cancel"].string_param:
                self.seen.append("told to end")
                continue
            self.seen.append("asked")
            dies = self.seen.count("asked") <= self.deaths
            self.away = 2 if dies else 0
            for _ in range(self.pieces if dies else 1):
                yield _response(request, not dies, "1")


@pytest.mark.parametrize(
    ("deaths", "pieces", "result", "asked"),
    [
        (1, 0, "", 2),
        (2, 0, "did not answer this request, sent 2 times: it was not ready meanwhile", 2),
        (1, 1, "broke off in the midst of this answer: it was not ready meanwhile, and its process may have died", 1),
    ],
)
def test_lost_stream_is_retried_once_unless_it_has_started(
    deaths: int, pieces: int, result: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pending_calls, "UNSTARTED_STREAM_LOST_AFTER_S", 0.05)
    monkeypatch.setattr(pending_calls, "SILENT_STREAM_LOST_AFTER_S", 0.02)
    monkeypatch.setattr(triton_stream, "PATIENCE_S", 0.05)

    async def told() -> tuple[Any, int]:
        async with serving(FakeDyingStreams(deaths, pieces)) as (fake, triton), asyncio.timeout(60):
            if not result:
                return await read(triton, "writes"), fake.seen.count("asked")
            with pytest.raises(ApiError, match=result) as error:
                await read(triton, "writes")
            return error.value.status, fake.seen.count("asked")

    assert asyncio.run(told()) == (503 if result else ["1"], asked)


class FakeCutStreams(FakeStreams):
    """Server that ends the stream without an error and without the last response, after `pieces` of the answer."""

    def __init__(self, pieces: int) -> None:
        super().__init__("ends")
        self.pieces = pieces

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[service_pb2.ModelStreamInferResponse]:
        request = await anext(aiter(requests))
        self.seen.append("asked")
        for _ in range(self.pieces):
            yield _response(request, False, "1")


@pytest.mark.parametrize(
    ("pieces", "asked", "result"),
    [(0, 2, "did not answer this request, sent 2 times"), (1, 1, "broke off in the midst of this answer")],
)
async def test_stream_without_its_last_response_is_an_error(pieces: int, asked: int, result: str) -> None:
    """Regression: a part of an answer was passed on as the whole."""
    async with serving(FakeCutStreams(pieces)) as (fake, triton), asyncio.timeout(60):
        with pytest.raises(ApiError, match=f"{result}: .* without its last response") as error:
            await read(triton, "writes")
        assert error.value.status == 503
        with pytest.raises(ServeError, match="without its last response"):
            await asyncio.to_thread(lambda: list(Responses(triton.url, REQUEST, 60)))
        assert fake.seen.count("asked") == asked + 1


async def read(triton: Triton, model: str = "for ever", streaming: bool = False) -> list[str]:
    """Return all texts of a model's answer; `streaming`: ask as TensorRT-LLM's clients do."""
    request = service_pb2.ModelInferRequest(model_name=model, id="of the client")
    if streaming:
        request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return [text async for outputs in triton.stream(request) for text in outputs["text_output"].strings()]

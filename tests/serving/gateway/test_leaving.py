"""Clients that disconnect from a call, as seen by its server, a small gRPC one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.serving.gateway import leaving, lost, streams
from builder.serving.gateway import triton as triton_module
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import LENGTH
from builder.serving.gateway.triton import Triton

REQUEST = service_pb2.ModelInferRequest(model_name="embeds")


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # of generated code
    """A Triton of a version, whose model answers when it is `released`; `seen`: how its requests ended.

    `looks`: its answers to whether its model is ready, which a gateway asks if a call takes long.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.requested, self.ended, self.released = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ready = True
        self.seen: list[str] = []
        self.looks: list[str] = []

    async def ServerMetadata(
        self, request: service_pb2.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ServerMetadataResponse:
        return service_pb2.ServerMetadataResponse(name="triton", version=self.version)

    async def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelReadyResponse:
        self.looks.append(f"{request.name}: {self.ready}")
        return service_pb2.ModelReadyResponse(ready=self.ready)

    async def ModelInfer(
        self, request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelInferResponse:
        await self._answered()
        return service_pb2.ModelInferResponse()

    async def _answered(self) -> None:
        self.requested.set()
        try:
            await self.released.wait()
            self.seen.append("answered")
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        finally:
            self.ended.set()


class FakeStreams(FakeServer):
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


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[tuple[FakeServer, Triton]]:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    triton = Triton(f"127.0.0.1:{port}")
    try:
        yield fake, triton
    finally:
        fake.released.set()
        await triton.close()
        await server.stop(None)


async def left(fake: FakeServer, triton: Triton) -> None:
    """Ask, and disconnect once the server has the request."""
    asking = asyncio.ensure_future(triton.infer(REQUEST))
    await fake.requested.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_a_call_that_nobody_waits_for_is_cancelled_on_a_server_that_takes_it() -> None:
    async def seen() -> list[str]:
        async with serving(FakeServer("2.59.0")) as (fake, triton):
            await left(fake, triton)
            await fake.ended.wait()
            return fake.seen

    assert asyncio.run(seen()) == ["cancelled"]


@pytest.mark.parametrize("version", ["2.51.0", "2.58.0", ""])
def test_elsewhere_it_is_answered(version: str) -> None:
    async def seen() -> list[str]:
        async with serving(FakeServer(version)) as (fake, triton):
            await left(fake, triton)
            await triton.version()  # a round trip, in which a cancellation would have come too
            fake.released.set()
            await fake.ended.wait()
            return fake.seen

    assert asyncio.run(seen()) == ["answered"]


def test_what_nobody_waits_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "MOST", 1)

    async def request() -> int:
        async with serving(FakeServer("2.51.0")) as (fake, triton):
            await left(fake, triton)
            await triton.version()
            with pytest.raises(ApiError, match="1 requests of embeds are on their way whose clients left") as refused:
                await triton.infer(REQUEST)
            fake.released.set()
            while triton.leaving.ends:
                await asyncio.wait(triton.leaving.ends)
            await triton.infer(REQUEST)
            return refused.value.status

    assert asyncio.run(request()) == 429


def test_what_is_never_answered_counts_no_more_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that had it died. Requests to the model, which answers again, would be refused for ever."""
    monkeypatch.setattr(leaving, "MOST", 1)
    monkeypatch.setattr(leaving, "LONGEST_S", 0.05)

    async def seen() -> list[str]:
        async with serving(FakeServer("2.51.0")) as (fake, triton):
            await left(fake, triton)
            async with asyncio.timeout(60):
                while triton.leaving.ends:
                    await asyncio.wait(triton.leaving.ends)
                await fake.ended.wait()
            fake.released.set()
            await triton.infer(REQUEST)
            return fake.seen

    assert asyncio.run(seen()) == ["cancelled", "answered"]


class FakeDying(FakeServer):
    """Server whose process dies of the first `deaths` requests: after each, its model is not ready at one look.

    The requests are answered if it only `drains`: an unloaded version first answers the requests that it has.
    """

    def __init__(self, deaths: int, drains: bool = False) -> None:
        super().__init__("2.59.0")
        self.ready, self.deaths, self.drains, self.asked = False, deaths, drains, 0

    async def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelReadyResponse:
        answer = await super().ModelReady(request, context)
        if self.ready and self.drains:
            self.released.set()
        self.ready = True
        return answer

    async def ModelInfer(
        self, request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelInferResponse:
        self.asked += 1
        if self.asked > self.deaths:
            return service_pb2.ModelInferResponse()
        self.ready = False
        return await super().ModelInfer(request, context)


@pytest.mark.parametrize(("drains", "lost_s", "asked"), [(True, 3600.0, 1), (False, 0.1, 2)])
def test_what_a_model_has_lost_is_asked_once_more(
    drains: bool, lost_s: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process died and started again: that alone does not show that a call is lost."""
    monkeypatch.setattr(lost, "LOOK_S", 0.01)
    monkeypatch.setattr(lost, "LOST_S", lost_s)

    async def request() -> int:
        async with serving(FakeDying(1, drains)) as (fake, triton), asyncio.timeout(60):
            await triton.infer(REQUEST)
            assert isinstance(fake, FakeDying)
            return fake.asked

    assert asyncio.run(request()) == asked


def test_a_model_that_is_ready_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "LOOK_S", 0.01)
    monkeypatch.setattr(lost, "LOST_S", 0.0)

    async def seen() -> list[str]:
        async with serving(FakeServer("2.59.0")) as (fake, triton), asyncio.timeout(60):
            asking = asyncio.ensure_future(triton.infer(REQUEST))
            while len(fake.looks) < 5:
                await asyncio.sleep(0.01)
            fake.released.set()
            await asking
            assert set(fake.looks) == {"embeds: True"}
            return fake.seen

    assert asyncio.run(seen()) == ["answered"]


def test_what_nobody_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "LOOK_S", 0.01)
    monkeypatch.setattr(lost, "LOST_S", 0.05)

    async def refusal() -> ApiError:
        async with serving(FakeDying(triton_module.ATTEMPTS)) as (_, triton), asyncio.timeout(60):
            with pytest.raises(ApiError, match=r"its process may have died\. Send it again later") as error:
                await triton.infer(REQUEST)
            return error.value

    assert asyncio.run(refusal()).status == 503


def test_a_gateway_that_stops_waits_for_what_was_left() -> None:
    async def seen() -> list[str]:
        async with serving(FakeServer("2.51.0")) as (fake, triton):
            await left(fake, triton)
            closing = asyncio.ensure_future(triton.close())
            await asyncio.sleep(0)
            fake.released.set()
            await closing
        return fake.seen

    assert asyncio.run(seen()) == ["answered"]


@pytest.mark.parametrize(
    ("reaction", "seen"),
    [
        ("ends", ["asked", "ended", "closed"]),
        ("refuses", ["asked", "cancelled"]),
        ("refuses TensorRT-LLM's", ["asked", "cancelled"]),
        ("ignores", ["asked", "cancelled"]),
    ],
)
def test_a_stream_that_nobody_reads_is_cancelled_only_where_its_model_does_not_end_it(
    reaction: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 0.1 if reaction == "ignores" else 3600.0)

    async def left() -> list[str]:
        async with serving(FakeStreams(reaction)) as (fake, triton):
            reading = asyncio.ensure_future(read(triton, streaming="TensorRT-LLM" in reaction))
            await fake.requested.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            async with asyncio.timeout(60):
                await fake.ended.wait()
            return fake.seen

    assert asyncio.run(left()) == seen


def test_a_stream_whose_last_response_has_come_is_closed() -> None:
    async def request() -> tuple[list[str], list[str]]:
        async with serving(FakeStreams("ends")) as (fake, triton):
            texts = await read(triton, "once")
            await fake.ended.wait()
            return texts, fake.seen

    assert asyncio.run(request()) == (["1"], ["asked", "closed"])


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
        (2, 0, "did not answer this request, sent 2 times, and was not ready meanwhile", 2),
        (1, 1, "broke off in the midst of this answer, and was not ready meanwhile; its process may have died", 1),
    ],
)
def test_a_stream_that_its_model_has_lost_is_asked_once_more_unless_it_has_begun(
    deaths: int, pieces: int, result: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "LOOK_S", 0.01)
    monkeypatch.setattr(lost, "GENERATED_S", 0.05)
    monkeypatch.setattr(lost, "SILENT_S", 0.02)
    monkeypatch.setattr(streams, "PATIENCE_S", 0.05)

    async def told() -> tuple[Any, int]:
        async with serving(FakeDyingStreams(deaths, pieces)) as (fake, triton), asyncio.timeout(60):
            if not result:
                return await read(triton, "writes"), fake.seen.count("asked")
            with pytest.raises(ApiError, match=result) as error:
                await read(triton, "writes")
            return error.value.status, fake.seen.count("asked")

    assert asyncio.run(told()) == (503 if result else ["1"], asked)


async def read(triton: Triton, model: str = "for ever", streaming: bool = False) -> list[str]:
    """Return all texts of a model's answer; `streaming`: ask as TensorRT-LLM's clients do."""
    request = service_pb2.ModelInferRequest(model_name=model, id="of the client")
    if streaming:
        request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return [text async for outputs in triton.stream(request) for text in outputs["text_output"].strings()]

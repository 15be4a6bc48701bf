"""Callers who leave a call: what its server, a small gRPC one, sees of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.gateway import leaving
from builder.gateway.errors import ApiError
from builder.gateway.triton import Triton

REQUEST = service_pb2.ModelInferRequest(model_name="embeds")


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # of generated code
    """A Triton of a version, whose model answers when it is `released`; `seen`: how its requests ended."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.asked, self.ended, self.released = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.seen: list[str] = []

    async def ServerMetadata(
        self, request: service_pb2.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ServerMetadataResponse:
        return service_pb2.ServerMetadataResponse(name="triton", version=self.version)

    async def ModelInfer(
        self, request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelInferResponse:
        await self._answered()
        return service_pb2.ModelInferResponse()

    async def _answered(self) -> None:
        self.asked.set()
        try:
            await self.released.wait()
            self.seen.append("answered")
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(version: str) -> AsyncIterator[tuple[FakeServer, Triton]]:
    fake, server = FakeServer(version), grpc.aio.server()
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
    """Ask, and leave once the server has the request."""
    asking = asyncio.ensure_future(triton.infer(REQUEST))
    await fake.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def test_a_call_that_nobody_waits_for_is_cancelled_on_a_server_that_takes_it() -> None:
    async def seen() -> list[str]:
        async with serving("2.59.0") as (fake, triton):
            await left(fake, triton)
            await fake.ended.wait()
            return fake.seen

    assert asyncio.run(seen()) == ["cancelled"]


@pytest.mark.parametrize("version", ["2.51.0", "2.58.0", ""])
def test_elsewhere_it_is_answered(version: str) -> None:
    async def seen() -> list[str]:
        async with serving(version) as (fake, triton):
            await left(fake, triton)
            await triton.version()  # a round trip, in which a cancellation would have come too
            fake.released.set()
            await fake.ended.wait()
            return fake.seen

    assert asyncio.run(seen()) == ["answered"]


def test_what_nobody_waits_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "MOST", 1)

    async def asked() -> int:
        async with serving("2.51.0") as (fake, triton):
            await left(fake, triton)
            await triton.version()
            with pytest.raises(ApiError, match="1 requests of embeds are on their way whose clients left") as refused:
                await triton.infer(REQUEST)
            fake.released.set()
            while triton.leaving.ends:
                await asyncio.wait(triton.leaving.ends)
            await triton.infer(REQUEST)
            return refused.value.status

    assert asyncio.run(asked()) == 429


def test_a_gateway_that_stops_waits_for_what_was_left() -> None:
    async def seen() -> list[str]:
        async with serving("2.51.0") as (fake, triton):
            await left(fake, triton)
            closing = asyncio.ensure_future(triton.close())
            await asyncio.sleep(0)
            fake.released.set()
            await closing
        return fake.seen

    assert asyncio.run(seen()) == ["answered"]

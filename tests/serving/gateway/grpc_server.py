"""A small gRPC server in place of Triton, as a gateway's client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.serving.gateway.triton import Triton

REQUEST = service_pb2.ModelInferRequest(model_name="embeds")


class FakeGrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # of generated code
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


@asynccontextmanager
async def serving(fake: FakeGrpcServer) -> AsyncIterator[tuple[FakeGrpcServer, Triton]]:
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


async def ask_and_disconnect(fake: FakeGrpcServer, triton: Triton) -> None:
    """Ask, and disconnect once the server has the request."""
    asking = asyncio.ensure_future(triton.infer(REQUEST))
    await fake.requested.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

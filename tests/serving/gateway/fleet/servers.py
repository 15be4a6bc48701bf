"""Tritons of a fleet: stand-ins behind real gRPC servers, which can be slow, full, broken or killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.fleet.backend import FleetBackend
from builder.serving.gateway.fleet.catalogue import FleetCatalogue
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.served_model import CANDIDATE_OF
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.tensors import Output
from tests.serving.gateway.fake_triton import MODELS, FakeTriton

CODES = {429: grpc.StatusCode.UNAVAILABLE, 503: grpc.StatusCode.UNAVAILABLE, 500: grpc.StatusCode.INTERNAL}


class FleetTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # of generated code
    """A Triton that has loaded these `versions` of each model. Its answers take `delay_s`, or fail with `error`.

    `candidates`: the model that each candidate may replace. Requests wait while `open` is not set, and calls that need
    no inference while `responds` is not. `requests` and `answered`: the names and versions of requests.
    """

    def __init__(
        self,
        versions: Mapping[str, tuple[str, ...]] | None = None,
        delay_s: float = 0.0,
        candidates: Mapping[str, str] | None = None,
    ) -> None:
        self.fake, self.delay_s, self.candidates = FakeTriton(slots=1000), delay_s, candidates or {}
        self.versions = dict(versions) if versions is not None else dict.fromkeys(MODELS, ("1",))
        self.is_ready = True
        self.error: ApiError | None = None
        self.broken_after: int | None = None  # pieces of a stream, after which its connection ends
        self.open = asyncio.Event()
        self.open.set()
        self.responds = asyncio.Event()
        self.responds.set()
        self.requests: list[tuple[str, str]] = []
        self.answered: list[tuple[str, str]] = []

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="triton", version="2.59.0")

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        await self.responds.wait()
        answer = service_pb2.RepositoryIndexResponse()
        for name, versions in self.versions.items():
            for version in versions:
                answer.models.add(name=name, version=version, state="READY")
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        await self.responds.wait()
        of = self.candidates.get(request.name)
        config = await self.fake.config(of or request.name, request.version)
        if of is not None:
            config.name, config.parameters[CANDIDATE_OF].string_value = request.name, of
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests.append((request.model_name, request.model_version))
        await self.open.wait()
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            await context.abort(CODES[self.error.status], self.error.message)
        if request.model_version not in self.versions.get(request.model_name, ()):
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"Request for unknown model: '{request.model_name}'")
        outputs = await self.fake.infer(request)
        self.answered.append((request.model_name, request.model_version))
        return _response(outputs)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            self.requests.append((request.model_name, request.model_version))
            await self.open.wait()
            if self.error is not None:
                yield service_pb2.ModelStreamInferResponse(error_message=self.error.message)
                return
            pieces = 0
            async for outputs in self.fake.stream(request):
                if pieces == self.broken_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                yield service_pb2.ModelStreamInferResponse(infer_response=_response(outputs))
                pieces += 1
            last = service_pb2.ModelStreamInferResponse()
            last.infer_response.parameters["triton_final_response"].bool_param = True
            yield last
            self.answered.append((request.model_name, request.model_version))
            return


def _response(outputs: Mapping[str, Output]) -> Any:
    response = service_pb2.ModelInferResponse()
    for name, output in outputs.items():
        response.outputs.add(name=name, datatype=output.datatype, shape=output.shape)
        response.raw_output_contents.append(output.raw)
    return response


@dataclass
class Fleet:
    """A gateway over stand-ins, which are killed and started by their number."""

    app: AccessLog
    members: FleetMembers
    models: FleetCatalogue
    tritons: list[FleetTriton]
    servers: list[Any]
    addresses: list[str]

    async def kill(self, number: int) -> None:
        """End a server at once, with its connections."""
        await self.servers[number].stop(None)

    async def start(self, number: int) -> None:
        """Start a server again at its address."""
        self.servers[number] = await _start(self.tritons[number], self.addresses[number])


async def _start(triton: FleetTriton, address: str) -> Any:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    server.port = server.add_insecure_port(address)
    await server.start()
    return server


@asynccontextmanager
async def fleet(
    *tritons: FleetTriton, watching: bool = False, now: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[Fleet]:
    """Run stand-ins and a gateway over them; `watching`: check the servers in the background too.

    `now`: its clock, which stands still by default, so that none is measured to be slow by chance. Raises TimeoutError
    after a minute.
    """
    servers = [await _start(triton, "127.0.0.1:0") for triton in tritons]
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    metrics = Metrics()
    members = FleetMembers(addresses, FleetMetrics(metrics.registry), now)
    await members.update()
    models = FleetCatalogue(members)
    app = make_app(GatewaySettings(), FleetBackend(members), None, models=models, metrics=metrics)
    watch = asyncio.ensure_future(members.watch() if watching else asyncio.sleep(0))
    try:
        async with asyncio.timeout(60):
            yield Fleet(app, members, models, list(tritons), servers, addresses)
    finally:
        watch.cancel()
        for triton in tritons:
            triton.open.set()
            triton.responds.set()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        await members.close()
        await asyncio.gather(*(server.stop(None) for server in servers))

"""Define the interface of an inference backend: Triton, a canary, models loaded on demand, several Tritons."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from tritonclient.grpc import service_pb2

from builder.serving.gateway.tensors import Outputs

Metadata = Sequence[tuple[str, str]]  # of a gRPC call
InferFunction = Callable[[service_pb2.ModelInferRequest, Metadata], Awaitable[Outputs]]
StreamFunction = Callable[[service_pb2.ModelInferRequest, Metadata], AsyncGenerator[Outputs, None]]


class Backend(Protocol):
    """Inference backend of the gateway."""

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs: ...

    def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]: ...

    async def ready(self) -> bool: ...


def as_stream(infer: InferFunction) -> StreamFunction:
    """Return `infer` as a stream of its one answer."""

    async def stream(request: service_pb2.ModelInferRequest, metadata: Metadata) -> AsyncGenerator[Outputs, None]:
        yield await infer(request, metadata)

    return stream

"""Interface of what answers inference requests: Triton, a canary split, models loaded on demand, Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from builder.serving.gateway.tensors import Outputs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from tritonclient.grpc import service_pb2


class Backend(Protocol):
    """Inference backend of the gateway."""

    async def infer(
        self, request: service_pb2.ModelInferRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> Outputs: ...

    def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> AsyncGenerator[Outputs, None]: ...

    async def ready(self) -> bool: ...

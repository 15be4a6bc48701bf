"""Client of the replicas for the gateway, with the interface of gateway.triton.Triton.

If a replica, or its Triton, is gone, its request is sent to another: inference has no side effects. A stream is retried
until its first answer was passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError, RayTaskError
from tritonclient.grpc import service_pb2

from builder.clusters.ray.wire import outputs
from builder.common.errors import first_line
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Outputs

AGAIN_S = (0.0, 0.1, 0.3, 1.0, 3.0)  # pause before each retry
READY_S = 5.0
AWAY = "unavailable"  # error code of an ApiError if a Triton, or a model in it, is not there


class Replicas:
    """Replicas of the deployment behind `handle`, a ray.serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def ready(self) -> bool:
        """Return True if there is a replica whose Triton answers."""
        try:
            return bool(await asyncio.wait_for(_whole(self.handle.ready.remote()), READY_S))
        except (RayError, TimeoutError):
            return False

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        """Return the answer of a replica. Raises ApiError."""
        ask = self.handle.options(multiplexed_model_id=request.model_name).infer
        data = request.SerializeToString()
        for pause in (*AGAIN_S, None):
            try:
                return outputs(await _whole(ask.remote(data, metadata)))
            except (RayError, ApiError) as error:
                await _before_again(error, pause)
        raise AssertionError("the last time returns or raises")

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of a replica as they come. Raises ApiError; closing the iterator early ends the request."""
        ask = self.handle.options(multiplexed_model_id=request.model_name, stream=True).stream
        data = request.SerializeToString()
        begun = False
        for pause in (*AGAIN_S, None):
            answers = ask.remote(data, metadata)
            try:
                async for answer in answers:
                    yield outputs(answer)
                    begun = True
                return
            except (RayError, ApiError) as error:
                await _before_again(error, None if begun else pause)
            finally:
                answers.cancel()  # no effect if it has ended


async def _whole(response: Any) -> Any:
    """Return the result of a replica's call; cancelling the caller cancels the call."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


async def _before_again(error: RayError | ApiError, pause: float | None) -> None:
    """Wait until a request may be retried. Raises ApiError if it may not."""
    if isinstance(error, RayTaskError) or (isinstance(error, ApiError) and error.code != AWAY):
        raise error
    if pause is None:
        gone = f"the replica that had this request is gone: {first_line(error)}"
        raise ApiError(503, gone, code=AWAY, retry_after=2) from error
    await asyncio.sleep(pause)

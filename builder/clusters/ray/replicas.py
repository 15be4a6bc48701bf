"""Client of the replicas for the gateway, with the interface of gateway.triton.Triton.

If a replica or its Triton died, its request is sent to another: inference has no side effects. A stream is retried
until its first answer was passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError
from tritonclient.grpc import service_pb2

from builder.common.errors import first_line
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Outputs

RETRY_DELAYS_S = (0.0, 0.1, 0.3, 1.0, 3.0)  # pause before each retry
READY_TIMEOUT_S = 5.0
UNAVAILABLE = "unavailable"  # error code of an ApiError if a Triton, or a model in it, is not there


class ReplicaBackend:
    """Replicas of the deployment behind `handle`, a ray.serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def ready(self) -> bool:
        """Return True if there is a replica whose Triton answers."""
        try:
            return bool(await asyncio.wait_for(_result_of(self.handle.ready.remote()), READY_TIMEOUT_S))
        except (RayError, TimeoutError):
            return False

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        """Return the answer of a replica. Raises ApiError."""
        ask = self.handle.options(multiplexed_model_id=request.model_name).infer
        data = request.SerializeToString()
        for pause in (*RETRY_DELAYS_S, None):
            try:
                return outputs_of(await _result_of(ask.remote(data, metadata)))
            except (RayError, ApiError) as error:
                await _wait_before_retry(error, pause)
        raise AssertionError("the last time returns or raises")

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of a replica as they come. Raises ApiError; closing the iterator early ends the request."""
        ask = self.handle.options(multiplexed_model_id=request.model_name, stream=True).stream
        data = request.SerializeToString()
        started = False
        for pause in (*RETRY_DELAYS_S, None):
            answers = ask.remote(data, metadata)
            try:
                async for answer in answers:
                    yield outputs_of(answer)
                    started = True
                return
            except (RayError, ApiError) as error:
                await _wait_before_retry(error, None if started else pause)
            finally:
                answers.cancel()  # no effect if it has ended


async def _result_of(response: Any) -> Any:
    """Return the result of a replica's call; cancelling the caller cancels the call."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


async def _wait_before_retry(error: RayError | ApiError, pause: float | None) -> None:
    """Wait until a request may be retried. Raises ApiError if it may not."""
    if isinstance(error, RayTaskError) or (isinstance(error, ApiError) and error.code != UNAVAILABLE):
        raise error
    if pause is None:
        gone = f"the replica that had this request is gone: {first_line(error)}"
        raise ApiError(503, gone, code=UNAVAILABLE, retry_after=2) from error
    await asyncio.sleep(pause)


@dataclass(frozen=True)
class Refusal:
    """ApiError in a form that can be pickled."""

    status: int
    message: str
    param: str | None
    code: str | None
    retry_after: float | None


Answer = Outputs | Refusal


def to_refusal(error: ApiError) -> Refusal:
    """Return the answer with which a replica replaces raising `error`."""
    return Refusal(error.status, error.message, error.param, error.code, error.retry_after)


def outputs_of(answer: Answer) -> Outputs:
    """Return the outputs of a replica's answer. Raises the ApiError if the answer is a refusal."""
    if not isinstance(answer, Refusal):
        return answer
    raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code, retry_after=answer.retry_after)

"""Send a streamed request on a gRPC stream of its own, which ends without being cancelled.

builder.serving.client.responses explains why, and how a request is ended early. Cancelling a caller that waits leaves
the stream alone; ending it needs a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, TypeAlias

import grpc
from tritonclient.grpc import service_pb2

from builder.serving.client.responses import PATIENCE_S, endable, ending, is_last, refuses_to_end

Message: TypeAlias = service_pb2.ModelStreamInferResponse


class TritonStream:
    """Sends a copy of `request` on `call`, a new ModelStreamInfer call.

    The copy is needed because ending the request names it again, and the caller may reuse the original meanwhile, also
    for another model. `has_started`: part of the answer has arrived. `is_complete`: the last response has arrived.
    `since`: when a piece was last taken, or the stream was created.
    """

    def __init__(self, call: Any, request: service_pb2.ModelInferRequest) -> None:
        self.call, self.request = call, service_pb2.ModelInferRequest()
        self.request.CopyFrom(request)
        endable(self.request)
        self.has_started = self.is_complete = self.has_ended = False
        self.since = time.monotonic()
        self._writing: asyncio.Future[Any] = asyncio.ensure_future(call.write(self.request))
        self._reading: asyncio.Future[Message | None] | None = None

    async def wait_sent(self) -> None:
        """Wait until the request is sent. Raises AioRpcError."""
        await asyncio.shield(self._writing)

    def next_message(self) -> asyncio.Future[Message | None]:
        """Return a future of the next message, None at the end. `take` returns its result and lets the next be read.

        It may fail with AioRpcError, also for a stream that did not end regularly. Do not cancel it: grpc would cancel
        the whole stream with it.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    def take(self) -> Message | None:
        """Return the message that was read. Raises AioRpcError."""
        message, self._reading = self.next_message().result(), None
        self.since = time.monotonic()
        return message

    async def end(self) -> None:
        """Make the model end the request and read the stream to its end; cancel the stream if that takes too long."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self.wait_sent()
                if not self.is_complete:
                    await self.call.write(ending(self.request))
                await self.call.done_writing()
                await self._read_to_end()
        self.call.cancel()  # has no effect on a stream that has ended

    async def _read_to_end(self) -> None:
        while True:
            await asyncio.wait({self.next_message()})
            message = self.take()
            if message is None or refuses_to_end(message, self.request):
                return

    async def _read(self) -> Message | None:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            self.has_ended = True
            code = await self.call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await self.call.details())
            return None
        self.has_started = self.has_started or bool(message.infer_response.outputs)
        self.is_complete = self.is_complete or is_last(message)
        return message

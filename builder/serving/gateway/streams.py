"""One streamed request on a gRPC stream of its own, which ends without being cancelled.

builder.serving.client.responses says why, and how a request is ended early. Cancelling a caller that waits leaves the
stream alone; ending it needs a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from builder.serving.client.responses import PATIENCE_S, endable, ending, is_last, refuses_to_end


class Stream:
    """Sends a copy of `request` on `call`, a new ModelStreamInfer call.

    The copy is needed because ending the request names it again, and the caller may reuse the original meanwhile, also
    for another model. `begun`: part of the answer has come. `last`: the last response has come. `since`: when a piece
    was last taken, or the stream was created.
    """

    def __init__(self, call: Any, request: service_pb2.ModelInferRequest) -> None:
        self.call, self.request = call, service_pb2.ModelInferRequest()
        self.request.CopyFrom(request)
        endable(self.request)
        self.begun = self.last = self.ended = False
        self.since = time.monotonic()
        self._asked: asyncio.Future[Any] = asyncio.ensure_future(call.write(self.request))
        self._reading: asyncio.Future[service_pb2.ModelStreamInferResponse | None] | None = None

    async def sent(self) -> None:
        """Wait until the request is sent. Raises AioRpcError."""
        await asyncio.shield(self._asked)

    def reading(self) -> asyncio.Future[service_pb2.ModelStreamInferResponse | None]:
        """Return a future of the next message, None at the end. `taken` returns its result and lets the next be read.

        It may fail with AioRpcError, also for a stream that did not end regularly. Do not cancel it: grpc would cancel
        the whole stream with it.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    def taken(self) -> service_pb2.ModelStreamInferResponse | None:
        """Return the message that was read. Raises AioRpcError."""
        message, self._reading = self.reading().result(), None
        self.since = time.monotonic()
        return message

    async def leave(self) -> None:
        """Make the model end the request and read the stream to its end; cancel the stream if that takes too long."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._end()
        self.call.cancel()  # has no effect on a stream that has ended

    async def _end(self) -> None:
        await self.sent()
        if not self.last:
            await self.call.write(ending(self.request))
        await self.call.done_writing()
        while (message := await self._next()) is not None:
            if refuses_to_end(message, self.request):
                break

    async def _next(self) -> service_pb2.ModelStreamInferResponse | None:
        await asyncio.wait({self.reading()})
        return self.taken()

    async def _read(self) -> service_pb2.ModelStreamInferResponse | None:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            self.ended = True
            await self._refuse_status()
            return None
        self.begun = self.begun or bool(message.infer_response.outputs)
        self.last = self.last or is_last(message)
        return message

    async def _refuse_status(self) -> None:
        """Raise the stream's error status, if it has one."""
        code = await self.call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await self.call.details())

"""One request of a model that streams, on a gRPC stream of its own, which ends without being cancelled.

Why, and how a request is ended early, builder.serve.responses says. A caller who is cancelled while it waits leaves
the stream as it is; to end it is for a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from builder.serve.responses import PATIENCE_S, endable, ending, is_last, refuses_to_end


class Stream:
    """Sends a copy of `request` on `call`, a fresh one of ModelStreamInfer.

    A copy, for it is named once more when it is to end: whoever asked may ask again meanwhile, or another model.
    `begun`: whether anything of the answer has come; `last`: whether its last response has; `since`: when a piece was
    last taken, or this was made.
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
        """Wait until the request has left. Raises AioRpcError."""
        await asyncio.shield(self._asked)

    def reading(self) -> asyncio.Future[service_pb2.ModelStreamInferResponse | None]:
        """What comes next of a request that was sent; None at the end. `taken` gives it, and what is read after it.

        It may fail with AioRpcError, also for a stream that did not end regularly. Nobody cancels it: grpc would cancel
        the whole stream with it.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    def taken(self) -> service_pb2.ModelStreamInferResponse | None:
        """What was read. Raises AioRpcError."""
        message, self._reading = self.reading().result(), None
        self.since = time.monotonic()
        return message

    async def leave(self) -> None:
        """Have the model end what still runs, and read the stream to its end; cancel it where that does not come."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._end()
        self.call.cancel()  # does nothing to what has ended

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
        """Raise what the stream ended with, unless that was its regular end."""
        code = await self.call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await self.call.details())

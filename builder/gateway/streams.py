"""One request of a model that streams, on a gRPC stream of its own, which ends without being cancelled.

Why, and how a request is ended early, builder.serve.responses says. A caller who is cancelled while it waits leaves
the stream as it is; to end it is for a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from builder.serve.responses import PATIENCE_S, endable, ending, is_last, refuses_to_end


class Stream:
    """Sends `request` on `call`, a fresh one of ModelStreamInfer. `last`: whether its last response has come."""

    def __init__(self, call: Any, request: service_pb2.ModelInferRequest) -> None:
        self.call, self.request = call, endable(request)
        self.last = self.ended = False
        self._asked: asyncio.Future[Any] = asyncio.ensure_future(call.write(self.request))
        self._reading: asyncio.Future[service_pb2.ModelStreamInferResponse | None] | None = None

    async def next(self) -> service_pb2.ModelStreamInferResponse | None:
        """What comes next; None at the end. Raises AioRpcError, also for a stream that did not end regularly.

        A caller who is cancelled leaves the reading to the next: grpc would cancel the whole stream with it.
        """
        await asyncio.shield(self._asked)
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message

    async def leave(self) -> None:
        """Have the model end what still runs, and read the stream to its end; cancel it where that does not come."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._end()
        self.call.cancel()  # does nothing to what has ended

    async def _end(self) -> None:
        await asyncio.shield(self._asked)
        if not self.last:
            await self.call.write(ending(self.request))
        await self.call.done_writing()
        while (message := await self.next()) is not None:
            if refuses_to_end(message, self.request):
                break

    async def _read(self) -> service_pb2.ModelStreamInferResponse | None:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            self.ended = True
            await self._refuse_status()
            return None
        self.last = self.last or is_last(message)
        return message

    async def _refuse_status(self) -> None:
        """Raise what the stream ended with, unless that was its regular end."""
        code = await self.call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), await self.call.details())

"""The responses of Triton to one request, on a gRPC stream of its own.

Triton 2.51 keeps a request, and with it the version of the model, for ever where its stream is cancelled after the last
response (server, v2.51.0, infer_handler.h, IssueRequestCancellation: the first request of a stream stays among those in
flight until the stream has ended). So the stream is closed for writing as soon as the request is out, what has had its
last response is read to the end, and only what still runs is cancelled.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.errors import ServeError

OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
LAST = "triton_final_response"


class Responses:
    """`timeout_s`: for each response. Iterating raises ServeError; `close` cancels what still runs."""

    def __init__(self, url: str, request: service_pb2.ModelInferRequest, timeout_s: float) -> None:
        self.name, self.url, self.timeout_s = request.model_name, url, timeout_s
        self._channel = grpc.insecure_channel(url, OPTIONS)
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(iter([request]))
        self._arrived: queue.SimpleQueue[service_pb2.ModelStreamInferResponse | grpc.RpcError | None]
        self._arrived = queue.SimpleQueue()
        self._ends = self._ended = False
        threading.Thread(target=self._read, name=f"responses of {self.name}", daemon=True).start()

    def __iter__(self) -> Iterator[service_pb2.ModelInferResponse]:
        while (message := self._next()) is not None:
            if message.error_message:
                raise ServeError(f"{self.name}: {message.error_message}")
            yield message.infer_response

    def close(self) -> None:
        """Read what has had its last response to the end, and cancel the rest."""
        with contextlib.suppress(ServeError):
            while not self._arrived.empty() or (self._ends and not self._ended):
                self._next()
        self._call.cancel()  # does nothing to what has ended
        self._channel.close()

    def _next(self) -> service_pb2.ModelStreamInferResponse | None:
        """What comes next; None at the end."""
        try:
            message = self._arrived.get(timeout=self.timeout_s)
        except queue.Empty:
            raise ServeError(f"{self.name}: no answer within {self.timeout_s:g} s") from None
        self._ended = message is None or isinstance(message, grpc.RpcError)
        if isinstance(message, grpc.RpcError):
            raise ServeError(
                f"{self.name}: the server at {self.url} does not answer: {message.details()}"  # type: ignore[attr-defined]
            ) from message
        if message is not None:
            self._ends = is_last(message)
        return message

    def _read(self) -> None:
        try:
            for message in self._call:
                self._arrived.put(message)
        except grpc.RpcError as error:
            self._arrived.put(error)
            return
        self._arrived.put(None)


def is_last(message: service_pb2.ModelStreamInferResponse) -> bool:
    """Whether nothing but the end of the stream follows."""
    return bool(message.error_message) or message.infer_response.parameters[LAST].bool_param

"""Stream Triton's responses to one request over a gRPC stream of its own, and end the request early if asked to.

If the cancellation of a stream crosses its last response, Triton keeps the request forever, and with it the model
version and its process: the first request of a stream stays in flight until the stream has ended and the request,
marked as waiting for its last callback, has received that callback (server, v2.51.0 to v2.71.0, infer_handler.h,
IssueRequestCancellation, and stream_infer_handler.cc, StreamInferResponseComplete; see also the review of pull request
8078). So a stream of a generating model is not cancelled. It stays open for writing until its last response, so that a
second request can make the model end the first (builder.runtime.generation_model), and it is read to its end.
TensorRT-LLM's model recognises the second request by its input `stop` and the same id (NVIDIA/TensorRT-LLM,
triton_backend/all_models/llmapi/tensorrt_llm/1/model.py, handle_stop_request); it then sends the last response only for
requests that stream. If a model supports neither, or does not answer, the stream is cancelled after all: vLLM's models,
and models built before this protocol existed, can remain in memory that way.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Iterator

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.common.errors import ServeError
from builder.runtime.fields import CANCEL, CANCEL_COMPANION

OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
LAST, SAY_LAST = "triton_final_response", "triton_enable_empty_final_response"
PATIENCE_S = 10.0  # time for a model to end a request
SEPARATOR, ENDING = "#", "#end"  # in request ids: follows the caller's part; marks the request that ends another
STREAMS, STOP, TEXT = "streaming", "stop", "text_input"  # inputs of TensorRT-LLM's model; only that model has the first
TRUE = b"\x01"


class Responses:
    """Stream of responses. `timeout_s`: for each response. Iterating raises ServeError; `close` ends the request."""

    def __init__(self, url: str, request: service_pb2.ModelInferRequest, timeout_s: float) -> None:
        self.name, self.url, self.timeout_s = request.model_name, url, timeout_s
        self._asked: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        self._request = endable(request)
        self._asked.put(self._request)
        self._channel = grpc.insecure_channel(url, OPTIONS)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter(self._asked.get, None))
        self._arrived: queue.SimpleQueue[service_pb2.ModelStreamInferResponse | grpc.RpcError | None]
        self._arrived = queue.SimpleQueue()
        self._ends = self._ended = False
        threading.Thread(target=self._read, name=f"responses of {self.name}", daemon=True).start()

    def __iter__(self) -> Iterator[service_pb2.ModelInferResponse]:
        while (message := self._next(self.timeout_s)) is not None:
            if message.error_message:
                raise ServeError(f"{self.name}: {message.error_message}")
            yield message.infer_response
        if not self._ends:
            raise ServeError(f"{self.name}: the server at {self.url} ended the stream without its last response")

    def close(self) -> None:
        """Make the model end the request and read the stream to its end; cancel the stream if that takes too long."""
        if not self._ends:
            self._asked.put(ending(self._request))
        self._asked.put(None)
        until = time.monotonic() + PATIENCE_S
        with contextlib.suppress(ServeError):
            while (message := self._next(until - time.monotonic())) is not None:
                if refuses_to_end(message, self._request):
                    break
        self._call.cancel()  # has no effect on a stream that has ended
        self._channel.close()

    def _next(self, timeout_s: float) -> service_pb2.ModelStreamInferResponse | None:
        """Return the next message; None at the end. Raises ServeError."""
        if self._ended:
            return None
        try:
            message = self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise ServeError(f"{self.name}: no answer within {timeout_s:g} s") from None
        self._ended = message is None or isinstance(message, grpc.RpcError)
        if isinstance(message, grpc.RpcError):
            raise ServeError(
                f"{self.name}: the server at {self.url} does not answer: {message.details()}"  # type: ignore[attr-defined]
            ) from message
        if message is not None:
            self._ends = self._ends or is_last(message)
        return message

    def _read(self) -> None:
        try:
            for message in self._call:
                if is_last(message):
                    self._asked.put(None)  # nothing more is written: the server may end the stream
                self._arrived.put(message)
        except grpc.RpcError as error:
            self._asked.put(None)
            self._arrived.put(error)
            return
        self._arrived.put(None)


def endable(request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
    """Give `request` a unique id, request its last response even if empty, and return it."""
    request.id = f"{request.id.partition(SEPARATOR)[0]}{SEPARATOR}{secrets.token_hex(8)}"
    request.parameters[SAY_LAST].bool_param = True
    return request


def ending(request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
    """Return the request that makes the model end `request`."""
    return _stopping(request) if _streams_in_tensorrt_llm(request) else _cancelling(request)


def _streams_in_tensorrt_llm(request: service_pb2.ModelInferRequest) -> bool:
    for index, sent in enumerate(request.inputs):
        if sent.name == STREAMS:
            raw = request.raw_input_contents
            return bool(raw[index] == TRUE) if raw else any(sent.contents.bool_contents)
    return False


def _stopping(request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
    """Return the ending for TensorRT-LLM. Its model requires a text, but does not read it."""
    ending = service_pb2.ModelInferRequest(model_name=request.model_name, id=request.id)
    ending.model_version = request.model_version
    ending.inputs.add(name=TEXT, datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"")
    ending.inputs.add(name=STOP, datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return ending


def _cancelling(request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
    """Return the ending for models of this project.

    It carries one input, because Triton's Python backend refuses a request without any if tensors have a batch
    dimension (python_backend, python_be.cc, CheckIncomingRequests). The input is not the text: vLLM, which needs it,
    would answer it again.
    """
    ending = service_pb2.ModelInferRequest(model_name=request.model_name, id=request.id + ENDING)
    ending.model_version = request.model_version
    shape = [1] * max((len(sent.shape) for sent in request.inputs), default=1)
    ending.inputs.add(name=CANCEL_COMPANION, datatype="BOOL", shape=shape).contents.bool_contents.append(True)
    ending.parameters[CANCEL].string_param = request.id
    return ending


def is_last(message: service_pb2.ModelStreamInferResponse) -> bool:
    """Return True if only the end of the stream follows."""
    return bool(message.error_message) or message.infer_response.parameters[LAST].bool_param


def refuses_to_end(message: service_pb2.ModelStreamInferResponse, request: service_pb2.ModelInferRequest) -> bool:
    """Return True if the model does not support the request that `ending` returned for `request`.

    The ending for TensorRT-LLM has the id of `request` itself; Triton names the input that it does not know (core,
    infer_request.cc, Normalize: "unexpected inference input 'stop'").
    """
    if _streams_in_tensorrt_llm(request):
        return f"'{STOP}'" in message.error_message
    return bool(message.error_message) and message.infer_response.id.endswith(ENDING)

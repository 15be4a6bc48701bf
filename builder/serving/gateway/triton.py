"""Asynchronous gRPC client of Triton: one connection to each address behind its name, one call per request.

A request to a streaming model has a gRPC stream of its own (builder.serving.gateway.streams), on an existing
connection, so opening it costs no round trip. A background task finishes a stream once its last response has come or
its client disconnected. Streams report errors as text, without a code. Triton can be asked for codes (the header
triton_grpc_error), but before release 26.04 it then reads freed memory and crashes (server, pull request 8708). So
`stream_error` classifies the texts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.leaving import Leaving
from builder.serving.gateway.lost import Lost
from builder.serving.gateway.models import NAME
from builder.serving.gateway.streams import Stream
from builder.serving.gateway.tensors import Outputs, add_tensor, read_outputs

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.lb_policy_name", "round_robin"),  # several servers behind one name share the requests
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),  # default: two minutes; a restarted server is found sooner
)
LOAD_TIMEOUT_S = 600.0
TIMEOUT_S = 30.0  # of calls that need no inference
CLOSING_S = 10.0  # for abandoned calls when the client closes
ATTEMPTS = 2  # of a request that was lost unanswered: repeating it has no side effects
HOLDING = ("READY", "LOADING", "UNLOADING")
QUEUE_FULL = ("wait already", "Exceeds maximum queue size")
OUT_OF_TIME = ("time was over", "Request timeout expired")
AWAY = ("is not ready", "shutting down", "Stub process", "no version is available", "Request for unknown model")
FAULTS = ("failed inside the model", "Failed to process the request", "Internal")
ALL, LIST = "*", "models"  # name that asks a shared front for its models, and the output with the list
STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# For requests to a model that the gateway has listed: NOT_FOUND then means that the model is being reloaded.
ANSWERING = {code: status for code, status in STATUS.items() if code is not grpc.StatusCode.NOT_FOUND}
Metadata = Sequence[tuple[str, str]]


class Triton:
    """One server, or several behind one address. Its calls raise ApiError."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.channel = grpc.aio.insecure_channel(url, options=OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.leaving = Leaving(self.version)

    async def close(self) -> None:
        if self.leaving.ends:
            await asyncio.wait(self.leaving.ends, timeout=CLOSING_S)
        await self.channel.close()

    async def version(self) -> str:
        """Return the server's version, such as "2.51.0"; "" if it does not answer."""
        try:
            answer = await self.stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return ""
        return str(answer.version)

    async def ready(self) -> bool:
        """Return True if the server answers and is ready."""
        try:
            answer = await self.stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def index(self) -> list[tuple[str, str]]:
        """Return (name, version) of each model that is ready."""
        with self._translated():
            answer = await self.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=TIMEOUT_S)
        return [(model.name, model.version) for model in answer.models]

    async def known(self) -> set[str]:
        """Return the names of all models of its repository, ready or not."""
        with self._translated():
            answer = await self.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=TIMEOUT_S)
        return {model.name for model in answer.models}

    async def config(self, name: str, version: str) -> Any:
        """Return the ModelConfig of a model."""
        with self._translated():
            request = service_pb2.ModelConfigRequest(name=name, version=version)
            answer = await self.stub.ModelConfig(request, timeout=TIMEOUT_S)
        return answer.config

    async def load(self, name: str) -> None:
        """Load a model as its config.pbtxt says; an earlier version answers until then."""
        with self._translated():
            request = service_pb2.RepositoryModelLoadRequest(model_name=name)
            await self.stub.RepositoryModelLoad(request, timeout=LOAD_TIMEOUT_S)

    async def unload(self, name: str) -> None:
        """Unload a model. It refuses new requests; its memory is freed when its last request is answered."""
        with self._translated():
            request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
            await self.stub.RepositoryModelUnload(request, timeout=LOAD_TIMEOUT_S)

    async def serves(self, name: str, version: str) -> bool:
        """Return True if a version of a model is loaded."""
        with self._translated():
            request = service_pb2.ModelReadyRequest(name=name, version=version)
            return bool((await self.stub.ModelReady(request, timeout=TIMEOUT_S)).ready)

    async def held(self) -> set[str]:
        """Return the models that use memory: loaded, loading or unloading."""
        with self._translated():
            answer = await self.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=TIMEOUT_S)
        return {model.name for model in answer.models if model.state in HOLDING}

    async def hosted(self, front: str) -> str:
        """Return hosted.json of a shared front, which lists the models it answers for."""
        request = service_pb2.ModelInferRequest(model_name=front)
        add_tensor(request, NAME, [ALL], (1, 1))
        request.outputs.add().name = LIST
        try:
            async with asyncio.timeout(TIMEOUT_S):
                (text,) = (await self.infer(request))[LIST].strings()
        except TimeoutError as error:
            raise ApiError(504, f"{front} does not say what it hosts within {TIMEOUT_S:g} s", code="timeout") from error
        return text

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        """Return the answer of a model that answers once.

        If the caller is cancelled, the call is cancelled too where the server can cancel safely. A request that its
        model lost is sent once more: the process may have been restarted.
        """

        async def ready() -> bool:
            return await self._ready(request.model_name, request.model_version)

        for _ in range(ATTEMPTS):
            with self._translated(ANSWERING), contextlib.suppress(Lost):
                call = self.stub.ModelInfer(request, metadata=metadata)
                return read_outputs(await self.leaving.answer(request.model_name, call, ready))
        raise _lost(f"{request.model_name} did not answer this request, sent {ATTEMPTS} times")

    async def _ready(self, name: str, version: str) -> bool:
        """Return whether a model is ready; True if the server does not say, since it then ends its calls itself."""
        try:
            return await self.serves(name, version)
        except ApiError as error:
            return error.status not in (400, 404)

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of a model as they arrive. Closing the iterator early ends the request.

        A request that its model lost before its first answer is sent once more.
        """
        for _ in range(ATTEMPTS):
            stream = Stream(self.stub.ModelStreamInfer(metadata=metadata), request)
            try:
                async with contextlib.aclosing(self._answers(stream)) as answers:
                    async for outputs in answers:
                        yield outputs
                return
            except Lost:
                if stream.begun:
                    raise _lost(f"{request.model_name} broke off in the midst of this answer") from None
            finally:
                if not stream.ended:
                    self.leaving.end(stream.leave())
        raise _lost(f"{request.model_name} did not answer this request, sent {ATTEMPTS} times")

    async def _answers(self, stream: Stream) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of one stream as they arrive. Raises ApiError and Lost."""
        request = stream.request

        async def ready() -> bool:
            return await self._ready(request.model_name, request.model_version)

        with self._translated(ANSWERING):
            await stream.sent()
            while not stream.last:
                losses, reading = self.leaving.losses, stream.reading()
                await losses.answered(reading, request.model_name, ready, stream.since, stream.begun)
                message = stream.taken()
                if message is None:
                    return
                if message.error_message:
                    raise stream_error(message.error_message)
                if message.infer_response.outputs:
                    yield read_outputs(message.infer_response)

    @contextlib.contextmanager
    def _translated(self, statuses: Mapping[grpc.StatusCode, int] = STATUS) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error(error, statuses) from error

    def _error(self, error: grpc.aio.AioRpcError, statuses: Mapping[grpc.StatusCode, int]) -> ApiError:
        """Return the error for a gRPC status."""
        message, code = error.details() or error.code().name, error.code()
        status = statuses.get(code)
        if status is not None:
            return ApiError(status, message, param="model" if status == 404 else None)
        if code is grpc.StatusCode.UNAVAILABLE:
            away = ApiError(503, f"Triton at {self.url} does not answer: {message}", code="unavailable", retry_after=2)
            return _by_its_message(message) or away
        return _by_its_message(message) or ApiError(500, message)


def _lost(what: str) -> ApiError:
    """Return the error for a request that will not be answered."""
    why = "and was not ready meanwhile; its process may have died. Send it again later; the server's log says more"
    return ApiError(503, f"{what}, {why}", code="unavailable", retry_after=2)


def stream_error(message: str) -> ApiError:
    """Return the error for an error text of a stream: the request's fault, unless the text is one of the server's."""
    return _by_its_message(message) or ApiError(500 if any(words in message for words in FAULTS) else 400, message)


def _by_its_message(message: str) -> ApiError | None:
    if any(words in message for words in QUEUE_FULL):
        return ApiError(429, message, code="queue_full", retry_after=1)
    if any(words in message for words in OUT_OF_TIME):
        return ApiError(504, message, code="timeout")
    if any(words in message for words in AWAY):
        return ApiError(503, message, code="unavailable", retry_after=2)
    return None

"""Triton over gRPC, asynchronously: one connection to each address behind its name, a call for each request.

A request for a model that streams has a gRPC stream of its own (builder.gateway.streams). It is opened on a connection
that is there already, which costs no round trip. What is left to do with it once its last response has come, or its
caller has gone, is for a task that nobody waits for.

Streams report errors as text, without a code. Triton can be asked for codes (the header triton_grpc_error), but until
release 26.04 it then reads freed memory, and ends (server, pull request 8708). So `stream_error` reads the texts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.gateway.errors import ApiError
from builder.gateway.leaving import Leaving
from builder.gateway.lost import Lost
from builder.gateway.models import NAME
from builder.gateway.streams import Stream
from builder.gateway.tensors import Outputs, add_tensor, read_outputs

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.lb_policy_name", "round_robin"),  # several servers behind one name share the requests
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),  # not two minutes: a server that was restarted is there again
)
LOAD_TIMEOUT_S = 600.0
TIMEOUT_S = 30.0  # of what needs no engine
CLOSING_S = 10.0  # for what was left to answer
ATTEMPTS = 2  # of a request of which nothing was answered, where the first is lost: to ask once more changes nothing
HOLDING = ("READY", "LOADING", "UNLOADING")
QUEUE_FULL = ("wait already", "Exceeds maximum queue size")
OUT_OF_TIME = ("time was over", "Request timeout expired")
AWAY = ("is not ready", "shutting down", "Stub process", "no version is available", "Request for unknown model")
FAULTS = ("failed inside the model", "Failed to process the request", "Internal")
ALL, LIST = "*", "models"  # what a shared front is asked for the models that it hosts, and the output that says so
STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Of a request for a model that the gateway has found in the list: it is not there because it is being loaded again.
ANSWERING = {code: status for code, status in STATUS.items() if code is not grpc.StatusCode.NOT_FOUND}
Metadata = Sequence[tuple[str, str]]


class Triton:
    """A server, or several behind one address. Its calls raise ApiError."""

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
        """What the server says that it is, such as "2.51.0"; "" where it does not answer."""
        try:
            answer = await self.stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return ""
        return str(answer.version)

    async def ready(self) -> bool:
        """Whether the server answers and says that it is ready."""
        try:
            answer = await self.stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def index(self) -> list[tuple[str, str]]:
        """(name, version) of each model that is ready."""
        with self._translated():
            answer = await self.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=TIMEOUT_S)
        return [(model.name, model.version) for model in answer.models]

    async def known(self) -> set[str]:
        """Return the names of all models of its repository, ready or not."""
        with self._translated():
            answer = await self.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=TIMEOUT_S)
        return {model.name for model in answer.models}

    async def config(self, name: str, version: str) -> Any:
        """The ModelConfig of a model."""
        with self._translated():
            request = service_pb2.ModelConfigRequest(name=name, version=version)
            answer = await self.stub.ModelConfig(request, timeout=TIMEOUT_S)
        return answer.config

    async def load(self, name: str) -> None:
        """Load a model as its config.pbtxt says; the version that answered before does so until then."""
        with self._translated():
            request = service_pb2.RepositoryModelLoadRequest(model_name=name)
            await self.stub.RepositoryModelLoad(request, timeout=LOAD_TIMEOUT_S)

    async def unload(self, name: str) -> None:
        """Have a model answer nothing new; its memory comes back when its last request is answered."""
        with self._translated():
            request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
            await self.stub.RepositoryModelUnload(request, timeout=LOAD_TIMEOUT_S)

    async def serves(self, name: str, version: str) -> bool:
        """Whether a version of a model is loaded."""
        with self._translated():
            request = service_pb2.ModelReadyRequest(name=name, version=version)
            return bool((await self.stub.ModelReady(request, timeout=TIMEOUT_S)).ready)

    async def held(self) -> set[str]:
        """The models that take memory: those that are loaded, and those that are about to be or to go."""
        with self._translated():
            answer = await self.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=TIMEOUT_S)
        return {model.name for model in answer.models if model.state in HOLDING}

    async def hosted(self, front: str) -> str:
        """hosted.json of a shared front, which says what models it answers for."""
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
        """The answer of a model that has one. A caller that is cancelled cancels the call where the server takes it.

        A request that its model lost is sent to it once more: its process may have been started again.
        """

        async def ready() -> bool:
            return await self._ready(request.model_name, request.model_version)

        for _ in range(ATTEMPTS):
            with self._translated(ANSWERING), contextlib.suppress(Lost):
                call = self.stub.ModelInfer(request, metadata=metadata)
                return read_outputs(await self.leaving.answer(request.model_name, call, ready))
        raise _lost(f"{request.model_name} did not answer this request, sent {ATTEMPTS} times")

    async def _ready(self, name: str, version: str) -> bool:
        """Whether a model is ready, as far as that is known: a server that is gone ends its calls itself."""
        try:
            return await self.serves(name, version)
        except ApiError as error:
            return error.status not in (400, 404)

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """The answers of a model as they come. An iterator that is closed early has the model end the request.

        A request that its model lost before it said anything is sent to it once more.
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
        """The answers of one stream as they come. Raises ApiError and Lost."""
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
        """What a client is told of a gRPC status."""
        message, code = error.details() or error.code().name, error.code()
        status = statuses.get(code)
        if status is not None:
            return ApiError(status, message, param="model" if status == 404 else None)
        if code is grpc.StatusCode.UNAVAILABLE:
            away = ApiError(503, f"Triton at {self.url} does not answer: {message}", code="unavailable", retry_after=2)
            return _by_its_message(message) or away
        return _by_its_message(message) or ApiError(500, message)


def _lost(what: str) -> ApiError:
    """What a client is told where nobody will answer."""
    why = "and was not ready meanwhile; its process may have died. Send it again later; the server's log says more"
    return ApiError(503, f"{what}, {why}", code="unavailable", retry_after=2)


def stream_error(message: str) -> ApiError:
    """What a client is told of an error in a stream: it is the request's, unless the text is one of the server's."""
    return _by_its_message(message) or ApiError(500 if any(words in message for words in FAULTS) else 400, message)


def _by_its_message(message: str) -> ApiError | None:
    if any(words in message for words in QUEUE_FULL):
        return ApiError(429, message, code="queue_full", retry_after=1)
    if any(words in message for words in OUT_OF_TIME):
        return ApiError(504, message, code="timeout")
    if any(words in message for words in AWAY):
        return ApiError(503, message, code="unavailable", retry_after=2)
    return None

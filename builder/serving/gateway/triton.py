"""Call Triton asynchronously over gRPC: one connection to each address behind its name, one call per request.

A request to a streaming model has a gRPC stream of its own (builder.serving.gateway.triton_stream), on an existing
connection, so opening it costs no round trip. A background task finishes a stream once its last response has come or
its client disconnected. Streams report errors as text, without a code. Triton can be asked for codes (the header
triton_grpc_error), but before release 26.04 it then reads freed memory and crashes (server, pull request 8708). So
`stream_error` classifies the texts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.runtime.adapter_files import ADAPTER, ALL_ADAPTERS
from builder.runtime.fields import Field
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ApiError, ServerUnreachable, unavailable
from builder.serving.gateway.http_responses import loads
from builder.serving.gateway.pending_calls import AbandonedCalls, BackendLost
from builder.serving.gateway.served_model import MODEL_INPUT, ServedModel
from builder.serving.gateway.tensors import Outputs, add_tensor, read_outputs
from builder.serving.gateway.triton_stream import TritonStream

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.lb_policy_name", "round_robin"),  # several servers behind one name share the requests
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),  # default: two minutes; a restarted server is found sooner
    # Keepalive makes gRPC set TCP_USER_TIMEOUT to keepalive_timeout_ms, which ends connections to vanished machines.
    # Triton refuses pings that come more often (--grpc-http2-min-recv-ping-interval-without-data).
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
LOAD_TIMEOUT_S = 600.0
TIMEOUT_S = 30.0  # of calls that need no inference
READY_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 10.0  # for abandoned calls when the client closes
ATTEMPTS = 2  # of a request that was lost before its first answer: repeating it has no side effects
NOT_READY = "it was not ready meanwhile, and its process may have died"
LOADED_STATES = ("READY", "LOADING", "UNLOADING")
QUEUE_FULL = ("wait already", "Exceeds maximum queue size")
TIMED_OUT = ("time was over", "Request timeout expired")
UNAVAILABLE = ("is not ready", "shutting down", "Stub process", "no version is available", "Request for unknown model")
SERVER_ERRORS = ("failed inside the model", "Failed to process the request", "Internal")
PROMPT_INPUT = Field("text_input", "TYPE_STRING")
TEXT, TOKENS = "text_output", "tokens"  # outputs with the names of adapters: of a generating model, and of an encoder
ALL_MODELS, MODEL_LIST = "*", "models"  # asks a shared front for its models; the output that lists them
STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # CANCELLED: by a server that stops
# For requests to a model that the gateway has listed: NOT_FOUND then means that the model is being reloaded.
INFER_STATUS = {code: status for code, status in STATUS.items() if code is not grpc.StatusCode.NOT_FOUND}


class Triton:
    """One server, or several behind one address. Its calls raise ApiError."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.channel = grpc.aio.insecure_channel(url, options=CHANNEL_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.abandoned = AbandonedCalls(self.version)

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the connection, after `grace_s` at most for running calls, which are then cancelled."""
        if self.abandoned.tasks:
            await asyncio.wait(self.abandoned.tasks, timeout=CLOSE_TIMEOUT_S)
        await self.channel.close(grace_s)

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
            return await self.reports_ready()
        except ApiError:
            return False

    async def reports_ready(self) -> bool:
        """Return what the server says of itself. Raises ApiError if it does not answer."""
        answer = await self._ask(self.stub.ServerReady, service_pb2.ServerReadyRequest(), READY_TIMEOUT_S)
        return bool(answer.ready)

    async def reports_live(self) -> bool:
        """Return True if the server runs, although a model may not be ready. Raises ApiError if it does not answer."""
        return bool((await self._ask(self.stub.ServerLive, service_pb2.ServerLiveRequest(), READY_TIMEOUT_S)).live)

    async def index(self) -> list[tuple[str, str]]:
        """Return (name, version) of each model that is ready."""
        answer = await self._ask(self.stub.RepositoryIndex, service_pb2.RepositoryIndexRequest(ready=True))
        return [(model.name, model.version) for model in answer.models]

    async def repository_models(self) -> set[str]:
        """Return the names of all models of its repository, ready or not."""
        answer = await self._ask(self.stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())
        return {model.name for model in answer.models}

    async def models_in_memory(self) -> set[str]:
        """Return the models that use memory: loaded, loading or unloading."""
        answer = await self._ask(self.stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())
        return {model.name for model in answer.models if model.state in LOADED_STATES}

    async def config(self, name: str, version: str) -> Any:
        """Return the ModelConfig of a model."""
        request = service_pb2.ModelConfigRequest(name=name, version=version)
        return (await self._ask(self.stub.ModelConfig, request)).config

    async def load(self, name: str) -> None:
        """Load a model as its config.pbtxt says; an earlier version answers until then."""
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        await self._ask(self.stub.RepositoryModelLoad, request, LOAD_TIMEOUT_S)

    async def unload(self, name: str) -> None:
        """Unload a model. It refuses new requests; its memory is freed when its last request is answered."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        await self._ask(self.stub.RepositoryModelUnload, request, LOAD_TIMEOUT_S)

    async def is_model_ready(self, name: str, version: str) -> bool:
        """Return True if a version of a model is loaded."""
        request = service_pb2.ModelReadyRequest(name=name, version=version)
        return bool((await self._ask(self.stub.ModelReady, request)).ready)

    async def _ask(self, method: Any, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        with self._api_errors():
            return await method(request, timeout=timeout_s)

    async def hosted(self, front: str) -> str:
        """Return hosted.json of a shared front, which lists the models it answers for."""
        request = service_pb2.ModelInferRequest(model_name=front)
        add_tensor(request, MODEL_INPUT, [ALL_MODELS], (1, 1))
        request.outputs.add().name = MODEL_LIST
        try:
            async with asyncio.timeout(TIMEOUT_S):
                (text,) = (await self.infer(request))[MODEL_LIST].strings()
        except TimeoutError as error:
            raise ApiError(504, f"{front} does not say what it hosts within {TIMEOUT_S:g} s", code="timeout") from error
        return text

    async def adapters(self, model: ServedModel) -> list[str]:
        """Return the adapters of a model that takes some."""
        name, shape = model.name, (1, 1) if model.batch else (1,)
        request = service_pb2.ModelInferRequest(model_name=name)
        required = [field for field in model.inputs.values() if not field.optional] or [PROMPT_INPUT]
        for field, value in (*((field, "-") for field in required), (ADAPTER, ALL_ADAPTERS)):
            add_tensor(request, field, [value], shape)
        try:
            async with asyncio.timeout(TIMEOUT_S), contextlib.aclosing(self.stream(request)) as answers:
                texts = [outputs[TEXT if TEXT in outputs else TOKENS].strings()[0] async for outputs in answers]
        except TimeoutError as error:
            raise ApiError(504, f"{name} does not list its adapters within {TIMEOUT_S:g} s", code="timeout") from error
        return [str(adapter) for adapter in loads("".join(texts))]

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        """Return the answer of a model that answers once.

        If the caller is cancelled, the call is cancelled too where the server can cancel safely. A request that its
        model lost is sent once more: the process may have been restarted.
        """
        is_ready = partial(self._is_ready, request.model_name, request.model_version)
        for _ in range(ATTEMPTS):
            with self._api_errors(INFER_STATUS), contextlib.suppress(BackendLost):
                call = self.stub.ModelInfer(request, metadata=metadata)
                return read_outputs(await self.abandoned.wait_for(request.model_name, call, is_ready))
        raise _lost(f"{request.model_name} did not answer this request, sent {ATTEMPTS} times")

    async def _is_ready(self, name: str, version: str) -> bool:
        """Return True if a model is ready, or if the server does not answer: its calls then fail by themselves."""
        try:
            return await self.is_model_ready(name, version)
        except ApiError as error:
            return error.status not in (400, 404)

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of a model as they arrive. Closing the iterator early ends the request.

        A request that its model lost before its first answer is sent once more.
        """
        for _ in range(ATTEMPTS):
            stream = TritonStream(self.stub.ModelStreamInfer(metadata=metadata), request)
            try:
                async with contextlib.aclosing(self._outputs(stream)) as answers:
                    async for outputs in answers:
                        yield outputs
                return
            except BackendLost as lost:
                reason = str(lost) or NOT_READY
                if stream.has_started:
                    raise _lost(f"{request.model_name} broke off in the midst of this answer", reason) from None
            finally:
                if not stream.has_ended:
                    self.abandoned.run_in_background(stream.end())
        raise _lost(f"{request.model_name} did not answer this request, sent {ATTEMPTS} times", reason)

    async def _outputs(self, stream: TritonStream) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of one stream as they arrive. Raises ApiError and BackendLost."""
        name, detector = stream.request.model_name, self.abandoned.detector
        is_ready = partial(self._is_ready, name, stream.request.model_version)
        with self._api_errors(INFER_STATUS):
            await stream.wait_sent()
            while not stream.is_complete:
                await detector.wait(stream.next_message(), name, is_ready, stream.since, stream.has_started)
                message = stream.take()
                if message is None:  # this side is open until the last response, so the server did not wait for it
                    raise BackendLost("Triton ended the stream without its last response")
                if message.error_message:
                    raise stream_error(message.error_message)
                if message.infer_response.outputs:
                    yield read_outputs(message.infer_response)

    @contextlib.contextmanager
    def _api_errors(self, statuses: Mapping[grpc.StatusCode, int] = STATUS) -> Any:
        """Raise ApiError in place of AioRpcError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            message, code = error.details() or error.code().name, error.code()
            status = statuses.get(code)
            if status is not None:
                raise ApiError(status, message, param="model" if status == 404 else None) from error
            known = _known_error(message)
            if known is None and code in UNREACHABLE:
                known = ServerUnreachable(f"Triton at {self.url} does not answer: {message}")
            raise known or ApiError(500, message) from error


def _lost(what: str, reason: str = NOT_READY) -> ApiError:
    """Return the error for a request that will not be answered."""
    return unavailable(f"{what}: {reason}. Send it again later; the server's log says more")


def stream_error(message: str) -> ApiError:
    """Return the error for an error text of a stream: the request's fault, unless the text is a known server error."""
    return _known_error(message) or ApiError(500 if any(text in message for text in SERVER_ERRORS) else 400, message)


def _known_error(message: str) -> ApiError | None:
    if any(text in message for text in QUEUE_FULL):
        return ApiError(429, message, code="queue_full", retry_after=1)
    if any(text in message for text in TIMED_OUT):
        return ApiError(504, message, code="timeout")
    return unavailable(message) if any(text in message for text in UNAVAILABLE) else None

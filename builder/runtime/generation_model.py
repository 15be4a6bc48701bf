"""Adapt a generating model to Triton's Python backend; emitted as model.py. Only transports tensors.

Decoupled: execute() hands requests to the decode loop and returns; responses are built and sent in a thread of their
own, so that a step never waits for the transport, or for log-probabilities to be written.

A request ends early if Triton reports that its client disconnected, or if another request names its id in the parameter
`cancel`, which is the safe way (builder.serving.client.responses explains why).
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from .adapters import Metrics, check_tensors_survive
from .fields import CANCEL, InputError, id_to_cancel, read_parameters, readable
from .generation.responses import Answer
from .generation.scheduler import DeadlineExceeded, QueueFull
from .generation.sequences import Request
from .generation.service import Service
from .generation.stats import FAMILIES
from .process_memory import MemoryTrimmer

CANCELLATION_POLL_S = 0.03
MAX_CONNECTION_CHECKS = 32  # of one poll; each check is a message to the server


class Cancelled(RuntimeError):
    """The client cancelled the request or disconnected."""


class TritonPythonModel:
    def initialize(self, args: "dict[str, str]") -> None:
        check_tensors_survive()
        folder = Path(args["model_repository"]) / args["model_version"]
        config = json.loads(args["model_config"])
        self.inputs = [entry["name"] for entry in config["input"]]
        self.batched = config.get("max_batch_size", 0) > 0  # then tensors have a leading dimension of 1
        self.service = Service(folder, self._infer)
        self.engine_name = self.service.serving.engine
        self.version = int(args["model_version"])  # also the engine's version: one build creates both
        self.engine_outputs = list(self.service.serving.outputs)
        self.outbox: "queue.SimpleQueue[Callable[[], None] | None]" = queue.SimpleQueue()
        self.open: "dict[Any, tuple[str, Request]]" = {}  # by sender: the request, with its id
        self.lock = threading.Lock()
        self.metrics = Metrics(FAMILIES, args["model_name"], args["model_version"])
        self._publish()
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._watch)]
        for thread in self.threads:
            thread.start()
        self.service.loop.start()

    def execute(self, requests: "list[Any]") -> None:
        """Start the requests, and raise nothing; encoder_model.py explains why."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except BaseException as error:  # a panic of a library is not an Exception
                self._respond(sender, error, True)

    def is_ready(self) -> bool:
        """Return True while the loop works; Triton 26.03 and later ask for readiness (python_backend, README.md)."""
        return self.service.loop.failure is None

    def finalize(self) -> None:
        self.service.loop.stop()
        self.stopping.set()
        self.outbox.put(None)
        for thread in self.threads:
            thread.join()
        self.outbox.put(None)
        self._send()  # sends errors that were queued after the thread ended

    def _submit(self, request: Any, sender: Any) -> None:
        parameters = read_parameters(request.parameters())
        inputs = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        if CANCEL in parameters:
            self._cancel_all(id_to_cancel(parameters, present))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        tensors = {name: tensor.as_numpy() for name, tensor in present.items()}
        if request.timeout():
            parameters.setdefault("timeout_ms", max(request.timeout() // 1000, 1))
        prepared = self.service.prepare(tensors, parameters, partial(self._respond, sender), self.outbox.put)
        if not prepared:  # answered already
            return
        with self.lock:  # before the start: the request has to be registered when its first answer comes
            self.open[sender] = request.request_id(), prepared[0].request
        self.service.start(prepared)

    def _cancel_all(self, name: str) -> None:
        """Cancel the requests with this id, if they still run."""
        with self.lock:
            named = [(sender, request) for sender, (own, request) in self.open.items() if own == name]
        for sender, request in named:
            self._cancel(sender, request)

    def _cancel(self, sender: Any, request: Request) -> None:
        if request.cancel():
            self.outbox.put(partial(self._respond, sender, Cancelled("the request was cancelled"), True))

    def _send(self) -> None:
        """Build and send responses, in the order of the loop."""
        while True:
            work = self.outbox.get()
            if work is None:
                return
            try:
                work()
            except BaseException as error:  # even a panic fails one response only: the others wait
                pb_utils.Logger.log_error(f"a response could not be made: {error!r}")
            del work  # Triton ends its request with the last reference to the sender

    def _respond(self, sender: Any, answer: "Answer | BaseException", last: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        if isinstance(answer, BaseException):
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(*_error(answer)))
        else:
            arrays = {name: array[None] for name, array in answer.items()} if self.batched else answer
            response = pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])
        if last:
            with self.lock:
                self.open.pop(sender, None)
        try:
            sender.send(response, flags=flags)
        except Exception as error:  # the client disconnected: its request must stop
            pb_utils.Logger.log_verbose(f"a response could not be sent: {error}")
            with self.lock:
                unfinished = self.open.pop(sender, None)
            if unfinished is not None:
                unfinished[1].cancel()

    def _watch(self) -> None:
        """Cancel requests of disconnected clients, publish metrics and trim memory."""
        trimmer = MemoryTrimmer()
        while not self.stopping.wait(CANCELLATION_POLL_S):
            self._cancel_disconnected()
            if self.metrics.due():
                self._publish()
                trimmer.trim_if_due()
            failure = self.service.loop.failure
            if failure is not None:
                self._publish()
                pb_utils.Logger.log_error(
                    f"the decode loop failed: {failure!r}; every request is refused until a reload"
                )
                return

    def _cancel_disconnected(self) -> None:
        """Cancel requests of disconnected clients; check a few, the least recently checked first."""
        with self.lock:
            checked = list(itertools.islice(self.open.items(), MAX_CONNECTION_CHECKS))
            for sender, entry in checked:
                del self.open[sender]
                self.open[sender] = entry  # now the last to be checked again
        for sender, (_, request) in checked:
            if request.active and self._is_cancelled(sender):
                self._cancel(sender, request)

    def _is_cancelled(self, sender: Any) -> bool:
        """Return True if the request was cancelled.

        Asks only senders whose last response has not been sent: otherwise the server reads freed memory and crashes.
        """
        with self.lock:
            return sender in self.open and bool(sender.is_cancelled())

    def _publish(self) -> None:
        loop = self.service.loop
        loop.stats.cache_usage = loop.cache.usage
        self.metrics.publish(loop.stats.values())

    def _infer(self, feeds: "dict[str, Any]", outputs: "Sequence[str]" = ()) -> "dict[str, Any]":
        """Call the engine's model; return arrays, but Triton's own tensors for caches and other outputs on a device.

        `outputs`: the requested ones; if empty, all.
        """
        names = list(outputs) or self.engine_outputs
        response = pb_utils.InferenceRequest(
            model_name=self.engine_name,
            model_version=self.version,
            requested_output_names=names,
            inputs=[_tensor(name, value) for name, value in feeds.items()],
        ).exec()
        if response.has_error():
            raise RuntimeError(f"{self.engine_name}: {response.error().message()}")
        tensors = {name: pb_utils.get_output_tensor_by_name(response, name) for name in names}
        on_gpu = self.service.serving.session.device == "cuda"
        handles = {n for n, tensor in tensors.items() if (on_gpu and n.startswith("present_")) or not tensor.is_cpu()}
        return {n: tensor if n in handles else tensor.as_numpy() for n, tensor in tensors.items()}


def _tensor(name: str, value: Any) -> Any:
    """Wrap an array as a Triton tensor, or give the tensor of an earlier call another name (DLPack, on its device).

    The backend copies it, within its device, into memory of the server's (python_backend, python_be.cc).
    """
    if isinstance(value, np.ndarray):
        return pb_utils.Tensor(name, value)
    return pb_utils.Tensor.from_dlpack(name, value.to_dlpack())


def _error(error: BaseException) -> "tuple[str, int]":
    """Return the message for the client, and Triton's code for it."""
    if isinstance(error, InputError):
        return readable(error), pb_utils.TritonError.INVALID_ARG
    if isinstance(error, Cancelled):
        return readable(error), pb_utils.TritonError.CANCELLED
    if isinstance(error, (QueueFull, DeadlineExceeded)):
        return readable(error), pb_utils.TritonError.UNAVAILABLE
    pb_utils.Logger.log_error(f"{type(error).__name__}: {readable(error)}")
    return (
        f"this request failed inside the model: {type(error).__name__}: {readable(error)}",
        pb_utils.TritonError.INTERNAL,
    )

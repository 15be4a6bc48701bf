"""Adapt a shared front to Triton's Python backend; emitted as model.py.

execute() answers the requests of a batch model by model. Those for a model in memory are answered at once or, when more
arrive than are answered, queued (encoder/request_queue.py); those for another model wait until it is loaded. Queued and
waiting requests are answered through their response senders, which models that are not decoupled have since release
24.06.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from .adapters import Metrics, check_tensors_survive
from .contract import ContractError, load_shared
from .cores import cores
from .encoder.request_queue import FAMILIES as QUEUE_FAMILIES
from .encoder.request_queue import QueuedRequest, RequestQueue
from .fields import InputError, option, readable, refuse_parameters
from .hosted import HostedModel
from .process_memory import resident, trim
from .shared.emitted import open_emitted
from .shared.host import FAMILIES, Host, Listing, LoadedModel
from .shared.loader import Loader, NotReady

MODEL, ALL, MODELS = "model", "*", "models"  # input that names the model; its value for the list of models; output
Tensors = dict[str, np.ndarray]
Job = tuple[Any, Tensors]  # a response sender, and the request's tensors


@dataclass(frozen=True)
class HostedRequest:
    """Request for a hosted model."""

    model: str
    tensors: Tensors


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        folder = Path(args["model_repository"]) / args["model_version"]
        serving = load_shared(folder)
        config = json.loads(args["model_config"])
        self.inputs = [field["name"] for field in config["input"]]
        self.listing = Listing(folder.parent / serving.repository)
        self.host = Host(self.listing, serving.memory_mb << 20, open_emitted, resident, trim)
        self.pool = ThreadPoolExecutor(cores())  # models of one batch are answered in parallel
        self.metrics = Metrics((*FAMILIES, *QUEUE_FAMILIES), args["model_name"], args["model_version"])
        timeout_s, rows = serving.queue_timeout_ms / 1000, config["max_batch_size"]
        self.queue = RequestQueue(serving.queue, timeout_s, rows, self._answer_queued, _refuse, _is_disconnected)
        self.loader = Loader(self.host, _answer, _fail, self._publish)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the responses, None for a request that is answered later. Raise nothing; see encoder_model.py."""
        try:
            return self._responses(requests)
        except BaseException as error:  # a panic of a library is not an Exception
            pb_utils.Logger.log_error(f"{type(error).__name__}: {readable(error)}")
            failure = RuntimeError(f"this request failed inside the model: {type(error).__name__}: {readable(error)}")
            return [_refusal(failure, pb_utils.TritonError.INTERNAL) for _ in requests]

    def _responses(self, requests: list[Any]) -> list[Any]:
        """Raise nothing once a request is queued, or it would be answered twice."""
        arrived = time.monotonic()
        self._refresh()
        read = [self._read(request) for request in requests]
        asked = {index: one for index, one in enumerate(read) if isinstance(one, HostedRequest)}
        responses = [None if isinstance(one, HostedRequest) else one for one in read]
        if self.queue.should_queue(arrived, sum(len(one.tensors[MODEL]) for one in asked.values())):
            queued = {index: _queued(requests[index], one) for index, one in asked.items()}
            self.queue.enqueue(arrived, [one for one in queued.values() if isinstance(one, QueuedRequest)])
            answers = {index: None if isinstance(one, QueuedRequest) else one for index, one in queued.items()}
        else:
            answers = self._answer_now(requests, asked)
            self.queue.record_answered()
        for index, response in answers.items():
            responses[index] = response
        return responses

    def is_ready(self) -> bool:
        """Return True while the front works; Triton 26.03 and later ask for readiness (python_backend, README.md)."""
        return self.queue.failure is None

    def finalize(self) -> None:
        self.queue.stop()
        self.loader.stop()
        self.pool.shutdown()

    def _refresh(self) -> None:
        try:
            self.listing.refresh()
        except (ContractError, OSError) as error:
            pb_utils.Logger.log_error(f"{error}; the models of before answer")

    def _read(self, request: Any) -> Any:
        """Read a request; return its response at once if it asks for the list of models, or is invalid."""
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        asked = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
        try:
            refuse_parameters(request.parameters(), self.inputs)
            name = _model(asked)
            if name == ALL:
                return self._list()
            _refuse_misfit(name, self.listing.get(name), asked)
        except InputError as error:
            return _refusal(error, pb_utils.TritonError.INVALID_ARG)
        return HostedRequest(name, asked)

    def _answer_now(self, requests: list[Any], asked: dict[int, HostedRequest]) -> dict[int, Any]:
        """Answer the requests of a batch; return the responses by index."""
        groups = _by_model({index: one.model for index, one in asked.items()})

        def answers(name: str) -> list[Any]:
            members = groups[name]
            tensors = [asked[index].tensors for index in members]
            return self._answers(name, tensors, lambda: [_copied(requests[index], asked[index]) for index in members])

        answered = (self.pool.map if len(groups) > 1 else map)(answers, groups)
        return {index: one for members, ones in zip(groups.values(), answered) for index, one in zip(members, ones)}

    def _answer_queued(self, queued: Sequence[QueuedRequest]) -> None:
        groups = _by_model({index: request.model for index, request in enumerate(queued)})

        def answer(name: str) -> None:
            jobs = [(queued[index].sender, queued[index].tensors) for index in groups[name]]
            for (sender, _), response in zip(jobs, self._answers(name, [tensors for _, tensors in jobs], lambda: jobs)):
                if response is not None:
                    _send(sender, response)

        list((self.pool.map if len(groups) > 1 else map)(answer, groups))

    def _answers(self, name: str, tensors: Sequence[Tensors], jobs: Callable[[], Sequence[Job]]) -> list[Any]:
        """Return a model's responses, or None for each if the `jobs` wait until it is loaded. Raises nothing."""
        try:
            return self._answer_or_load(name, tensors, jobs)
        except InputError as error:  # it is no longer hosted
            return [_refusal(error, pb_utils.TritonError.INVALID_ARG) for _ in tensors]
        except BaseException as error:  # a panic of the tokenizers library is not an Exception
            pb_utils.Logger.log_error(f"{name}: {type(error).__name__}: {readable(error)}")
            failure = RuntimeError(f"the model {name} failed: {type(error).__name__}: {error}")
            return [_refusal(failure, pb_utils.TritonError.INTERNAL) for _ in tensors]

    def _answer_or_load(self, name: str, tensors: Sequence[Tensors], jobs: Callable[[], Sequence[Job]]) -> list[Any]:
        """Answer with the requested build; with the previous one only if that fails to load."""
        build = self.listing.get(name).build
        model = self.host.acquire(name)
        try:
            if model is not None and model.build == build:
                return _answered(model, tensors)
            self.loader.request(name, build, jobs())
            return [None] * len(tensors)
        except NotReady as error:
            if model is not None:
                return _answered(model, tensors)
            return [_refusal(error, pb_utils.TritonError.UNAVAILABLE) for _ in tensors]
        finally:
            if model is not None:
                self.host.release(model)

    def _publish(self) -> None:
        if self.metrics.due():
            self.metrics.publish({**self.host.values(), **self.queue.values()})

    def _list(self) -> Any:
        text = np.array([[self.listing.text().encode("utf-8")]], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor(MODELS, text)])


def _model(tensors: Tensors) -> str:
    if MODEL not in tensors:  # Triton lets a request without it through if other inputs are optional
        raise InputError("model is missing: say whose request it is")
    return str(option(tensors, MODEL, None))


def _refuse_misfit(name: str, model: HostedModel, tensors: Tensors) -> None:
    """Raise InputError for a request that the model's own front would refuse: Triton checks only the shared one."""
    inputs = [tensor for tensor in tensors if tensor != MODEL]
    for tensor in inputs:
        if tensor not in model.inputs:
            raise InputError(f"{tensor} is not an input of {name}; it has {', '.join(model.inputs)}")
    for tensor, optional in model.inputs.items():
        if not optional and tensor not in tensors:
            raise InputError(f"{tensor} is missing; {name} does not answer without it")
    rows = len(tensors[MODEL])
    if rows > model.max_batch_size:
        raise InputError(f"the request has {rows} rows; {name} takes at most {model.max_batch_size} at once")


def _by_model(models: Mapping[int, str]) -> dict[str, list[int]]:
    """Group the indices of the requests by model."""
    groups: dict[str, list[int]] = {}
    for place, model in models.items():
        groups.setdefault(model, []).append(place)
    return groups


def _copied(request: Any, asked: HostedRequest) -> Job:
    """Copy what is needed after execute() has returned, when Triton frees the request."""
    return request.get_response_sender(), {name: array.copy() for name, array in asked.tensors.items()}


def _queued(request: Any, asked: HostedRequest) -> Any:
    """Return a request as QueuedRequest, or the response to one that cannot be copied."""
    try:
        return QueuedRequest(*_copied(request, asked), len(asked.tensors[MODEL]), asked.model)
    except Exception as error:
        return _refusal(error, pb_utils.TritonError.INTERNAL)


def _is_disconnected(request: QueuedRequest) -> bool:
    return bool(request.sender.is_cancelled())


def _refuse(request: QueuedRequest, error: BaseException) -> None:
    _send(request.sender, _refusal(error, pb_utils.TritonError.UNAVAILABLE))


def _answered(model: LoadedModel, tensors: Sequence[Tensors]) -> list[Any]:
    """Return the responses of a model that is in use, from its own emitted Python."""
    arrays = [{name: array for name, array in one.items() if name != MODEL} for one in tensors]
    with model.lock:
        answers = model.front.answer(arrays)
    return [model.front.response(answer) for answer in answers]


def _answer(model: LoadedModel, jobs: Sequence[Job]) -> None:
    for (sender, _), response in zip(jobs, _answered(model, [tensors for _, tensors in jobs])):
        _send(sender, response)


def _fail(jobs: Sequence[Job], error: Exception) -> None:
    pb_utils.Logger.log_error(readable(error))
    for sender, _ in jobs:
        _send(sender, _refusal(error, pb_utils.TritonError.UNAVAILABLE))


def _send(sender: Any, response: Any) -> None:
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the client disconnected
        pb_utils.Logger.log_verbose(f"a response could not be sent: {error}")


def _refusal(error: BaseException, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(readable(error), code))

"""The adapter of a shared front to Triton's Python backend; emitted as model.py.

The requests of a batch are answered model by model. Those for a model that is in memory get their answers from
execute(); those for another one wait for it, and are answered through their response senders, which models that are not
decoupled have since release 24.06, so that nobody else waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from .contract import ContractError, HostedModel, load_shared
from .cores import cores
from .fields import InputError, option, readable, refuse_parameters
from .shared import memory
from .shared.emitted import open_emitted
from .shared.host import Host, Loaded
from .shared.listing import Listing
from .shared.loader import Loader, NotReady
from .shared.metrics import Metrics
from .tensors_check import check_tensors_survive

MODEL, ALL, MODELS = "model", "*", "models"  # the input that names the model; for the list of them, which is the output
Job = tuple[Any, "dict[str, np.ndarray]"]  # a response sender, and what was asked


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        folder = Path(args["model_repository"]) / args["model_version"]
        serving = load_shared(folder)
        self.inputs = [field["name"] for field in json.loads(args["model_config"])["input"]]
        self.listing = Listing(folder.parent / serving.repository)
        self.host = Host(self.listing, serving.memory_mb << 20, open_emitted, memory.resident, memory.give_back)
        self.pool = ThreadPoolExecutor(cores())  # models of one batch are answered side by side
        self.metrics = Metrics(args["model_name"], args["model_version"])
        self.loader = Loader(self.host, _answer, _fail, lambda: self.metrics.publish(self.host))

    def execute(self, requests: list[Any]) -> list[Any]:
        """None for a request that is answered later."""
        self._refresh()
        responses: list[Any] = [None] * len(requests)
        groups: dict[str, list[int]] = {}
        tensors = [self._tensors(request) for request in requests]
        for index, tensor in enumerate(tensors):
            try:
                refuse_parameters(requests[index].parameters(), self.inputs)
                name = _model(tensor)
                if name == ALL:
                    responses[index] = self._list()
                    continue
                _refuse_misfit(name, self.listing.get(name), tensor)
                groups.setdefault(name, []).append(index)
            except InputError as error:
                responses[index] = _refusal(error, pb_utils.TritonError.INVALID_ARG)
        answered = (self.pool.map if len(groups) > 1 else map)(
            lambda name: self._answers(name, groups[name], requests, tensors), groups
        )
        for members, answers in zip(groups.values(), answered):
            for index, response in zip(members, answers):
                responses[index] = response
        return responses

    def finalize(self) -> None:
        self.loader.stop()
        self.pool.shutdown()

    def _refresh(self) -> None:
        try:
            self.listing.refresh()
        except (ContractError, OSError) as error:
            pb_utils.Logger.log_error(f"{error}; the models of before answer")

    def _tensors(self, request: Any) -> dict[str, np.ndarray]:
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}

    def _answers(
        self, name: str, members: Sequence[int], requests: list[Any], tensors: list[dict[str, np.ndarray]]
    ) -> list[Any]:
        """The responses of a model to its requests of this batch, or None for each where what is to answer has to be
        loaded first; the version before answers only where that one does not load.
        """
        model, build = self.host.take(name), self.listing.get(name).build
        try:
            if model is not None and model.build == build:
                return _answered(model, [tensors[index] for index in members])
            self.loader.ask(name, build, [_kept(requests[index], tensors[index]) for index in members])
            return [None] * len(members)
        except NotReady as error:
            if model is not None:
                return _answered(model, [tensors[index] for index in members])
            return [_refusal(error, pb_utils.TritonError.UNAVAILABLE) for _ in members]
        finally:
            if model is not None:
                self.host.leave(model)

    def _list(self) -> Any:
        text = np.array([[self.listing.text().encode("utf-8")]], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor(MODELS, text)])


def _model(tensors: dict[str, np.ndarray]) -> str:
    if MODEL not in tensors:  # Triton lets a request without it through where other inputs are optional
        raise InputError("model is missing: say whose request it is")
    return str(option(tensors, MODEL, None))


def _refuse_misfit(name: str, model: HostedModel, tensors: dict[str, np.ndarray]) -> None:
    """Raise InputError for what the model's own front would not take: Triton knows the shared one alone."""
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


def _kept(request: Any, tensors: dict[str, np.ndarray]) -> Job:
    """What is left of a request when execute() has returned: Triton takes its memory back then."""
    return request.get_response_sender(), {name: array.copy() for name, array in tensors.items()}


def _answered(model: Loaded, tensors: Sequence[dict[str, np.ndarray]]) -> list[Any]:
    """The responses of a model that is taken, by its own emitted Python."""
    arrays = [{name: array for name, array in one.items() if name != MODEL} for one in tensors]
    with model.lock:
        answers = model.front.answer(arrays)
    return [model.front.response(answer) for answer in answers]


def _answer(model: Loaded, jobs: Sequence[Job]) -> None:
    for (sender, _), response in zip(jobs, _answered(model, [tensors for _, tensors in jobs])):
        _send(sender, response)


def _fail(jobs: Sequence[Job], error: Exception) -> None:
    pb_utils.Logger.log_error(readable(error))
    for sender, _ in jobs:
        _send(sender, _refusal(error, pb_utils.TritonError.UNAVAILABLE))


def _send(sender: Any, response: Any) -> None:
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the client is gone
        pb_utils.Logger.log_verbose(f"a response could not be sent: {error}")


def _refusal(error: Exception, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(readable(error), code))

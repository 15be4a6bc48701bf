"""Adapt an encoder to Triton's Python backend; emitted as model.py.

execute() answers requests in the batches that Triton makes. When more arrive than are answered, the front takes them
over (encoder/waiting.py), and they are answered through their response senders, which models that are not decoupled
have since release 24.06.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from .encoder.front import open_front
from .encoder.metrics import FAMILIES, values
from .encoder.transport import refusal, response, tensors_of
from .encoder.waiting import Taken, Waiting
from .metrics import Metrics
from .tensors_check import check_tensors_survive


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        config = json.loads(args["model_config"])
        self.inputs = [field["name"] for field in config["input"]]
        self.front = open_front(Path(args["model_repository"]) / args["model_version"])
        self.metrics = Metrics(FAMILIES, args["model_name"], args["model_version"])
        self.metrics.publish({"loaded_timestamp_seconds": time.time()})
        serving = self.front.serving
        size = -(-serving.queue // sum(group["count"] for group in config["instance_group"]))  # one share each
        timeout_s, rows = serving.queue_timeout_ms / 1000, config["max_batch_size"]
        self.waiting = Waiting(size, timeout_s, rows, self._answer_later, _refuse, _left)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the responses, None for a request that is answered later. Raise nothing.

        Where execute() raises, Triton may keep the requests, and with them the model and its process, until the server
        ends: the stub says in a byte that it never sets whether it freed them (python_backend, pb_stub.cc,
        ProcessRequests, is_response_factory_deleted; releases 24.10 to 26.09).
        """
        try:
            return self._responses(requests)
        except BaseException as error:  # a panic of a library is no Exception
            return [response(error) for _ in requests]

    def _responses(self, requests: list[Any]) -> list[Any]:
        """Raise nothing once a request is taken, or it would be answered twice."""
        came = time.monotonic()
        responses = [refusal(request, self.inputs) for request in requests]
        left = [index for index, refused in enumerate(responses) if refused is None]
        tensors = [tensors_of(requests[index], self.inputs) for index in left]
        rows = [len(next(iter(one.values()), ())) for one in tensors]
        if self.waiting.takes(came, sum(rows)):
            taken = [_taken(requests[index], one, size) for index, one, size in zip(left, tensors, rows)]
            self.waiting.take(came, [one for one in taken if isinstance(one, Taken)])
            answers = [None if isinstance(one, Taken) else response(one) for one in taken]
        else:
            answers = self._answers(tensors)
            self.waiting.answered()
        for index, answered in zip(left, answers):
            responses[index] = answered
        return responses

    def is_ready(self) -> bool:
        """Return True while the front works; Triton calls this since release 26.03 (python_backend, README.md).

        It does so when a client asks for readiness.
        """
        return self.waiting.failure is None

    def finalize(self) -> None:
        self.waiting.stop()

    def _answers(self, tensors: Sequence[dict[str, np.ndarray]]) -> list[Any]:
        answers = self.front(tensors)
        if self.metrics.due():
            self.metrics.publish(values(self.front.counts, self.waiting))
        return [response(answer) for answer in answers]

    def _answer_later(self, taken: Sequence[Taken]) -> None:
        for request, answered in zip(taken, self._answers([request.tensors for request in taken])):
            _send(request, answered)


def _taken(request: Any, tensors: dict[str, np.ndarray], rows: int) -> Taken | Exception:
    """Copy what a request needs after execute() has returned, when Triton frees its memory."""
    try:
        copies = {name: array.copy() for name, array in tensors.items()}
        return Taken(request.get_response_sender(), copies, rows)
    except Exception as error:
        return error


def _left(request: Taken) -> bool:
    return bool(request.sender.is_cancelled())


def _refuse(request: Taken, error: BaseException) -> None:
    _send(request, response(error))


def _send(request: Taken, answered: Any) -> None:
    try:
        request.sender.send(answered, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the client disconnected
        pb_utils.Logger.log_verbose(f"a response could not be sent: {error}")

"""Adapt an encoder to Triton's Python backend; emitted as model.py.

execute() answers requests in the batches that Triton makes. When more arrive than are answered, the front
queues them (encoder/request_queue.py), and answers them through their response senders, which models that are not
decoupled have since release 24.06.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from .adapters import Metrics, check_tensors_survive
from .encoder.front import open_front
from .encoder.pipeline import FAMILIES
from .encoder.request_queue import FAMILIES as QUEUE_FAMILIES
from .encoder.request_queue import QueuedRequest, RequestQueue
from .encoder.transport import refusal, response, tensors_of


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        config = json.loads(args["model_config"])
        self.inputs = [field["name"] for field in config["input"]]
        self.front = open_front(Path(args["model_repository"]) / args["model_version"])
        self.metrics = Metrics((*FAMILIES, *QUEUE_FAMILIES), args["model_name"], args["model_version"])
        self.metrics.publish({"loaded_timestamp_seconds": time.time()})
        serving = self.front.serving
        size = -(-serving.queue // sum(group["count"] for group in config["instance_group"]))  # equal shares
        timeout_s, rows = serving.queue_timeout_ms / 1000, config["max_batch_size"]
        self.queue = RequestQueue(size, timeout_s, rows, self._answer_queued, _refuse, _is_disconnected)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the responses, None for a request that is answered later. Raise nothing.

        Where execute() raises, Triton may keep the requests, and with them the model and its process, until the server
        ends: the stub reports whether it freed them in a byte that it never sets (python_backend, pb_stub.cc,
        ProcessRequests, is_response_factory_deleted; releases 24.10 to 26.09).
        """
        try:
            return self._responses(requests)
        except BaseException as error:  # a panic of a library is not an Exception
            return [response(error) for _ in requests]

    def _responses(self, requests: list[Any]) -> list[Any]:
        """Raise nothing once a request is queued, or it would be answered twice."""
        arrived = time.monotonic()
        responses = [refusal(request, self.inputs) for request in requests]
        valid = [index for index, refused in enumerate(responses) if refused is None]
        tensors = [tensors_of(requests[index], self.inputs) for index in valid]
        rows = [len(next(iter(one.values()), ())) for one in tensors]
        if self.queue.should_queue(arrived, sum(rows)):
            queued = [_queued(requests[index], one, size) for index, one, size in zip(valid, tensors, rows)]
            self.queue.enqueue(arrived, [one for one in queued if isinstance(one, QueuedRequest)])
            answers = [None if isinstance(one, QueuedRequest) else response(one) for one in queued]
        else:
            answers = self._answers(tensors)
            self.queue.record_answered()
        for index, answer in zip(valid, answers):
            responses[index] = answer
        return responses

    def is_ready(self) -> bool:
        """Return True while the front works; Triton 26.03 and later ask for readiness (python_backend, README.md)."""
        return self.queue.failure is None

    def finalize(self) -> None:
        self.queue.stop()

    def _answers(self, tensors: Sequence[dict[str, np.ndarray]]) -> list[Any]:
        answers = self.front(tensors)
        if self.metrics.due():
            self.metrics.publish({**self.front.counts.values(), **self.queue.values()})
        return [response(answer) for answer in answers]

    def _answer_queued(self, requests: Sequence[QueuedRequest]) -> None:
        for request, answer in zip(requests, self._answers([request.tensors for request in requests])):
            _send(request, answer)


def _queued(request: Any, tensors: dict[str, np.ndarray], rows: int) -> QueuedRequest | Exception:
    """Copy what is needed after execute() has returned, when Triton frees the request."""
    try:
        copies = {name: array.copy() for name, array in tensors.items()}
        return QueuedRequest(request.get_response_sender(), copies, rows)
    except Exception as error:
        return error


def _is_disconnected(request: QueuedRequest) -> bool:
    return bool(request.sender.is_cancelled())


def _refuse(request: QueuedRequest, error: BaseException) -> None:
    _send(request, response(error))


def _send(request: QueuedRequest, answer: Any) -> None:
    try:
        request.sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the client disconnected
        pb_utils.Logger.log_verbose(f"a response could not be sent: {error}")

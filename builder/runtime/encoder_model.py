"""The adapter of an encoder to Triton's Python backend; emitted as model.py.

Requests are answered by execute(), in the batches that Triton makes. Where more come than are answered it takes them
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
from .encoder.transport import Metrics, refusal, response, tensors_of
from .encoder.waiting import Job, Waiting
from .tensors_check import check_tensors_survive


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        config = json.loads(args["model_config"])
        self.inputs = [field["name"] for field in config["input"]]
        self.front = open_front(Path(args["model_repository"]) / args["model_version"])
        self.metrics = Metrics(args["model_name"], args["model_version"])
        serving = self.front.serving
        size = -(-serving.queue // sum(group["count"] for group in config["instance_group"]))  # each has its share
        timeout_s, rows = serving.queue_timeout_ms / 1000, config["max_batch_size"]
        self.waiting = Waiting(size, timeout_s, rows, self._answer_later, _refuse, _left)

    def execute(self, requests: list[Any]) -> list[Any]:
        """None for a request that is answered later."""
        came = time.monotonic()
        responses = [refusal(request, self.inputs) for request in requests]
        left = [index for index, refused in enumerate(responses) if refused is None]
        tensors = [tensors_of(requests[index], self.inputs) for index in left]
        rows = [len(next(iter(one.values()), ())) for one in tensors]
        if self.waiting.takes(came, sum(rows)):
            jobs = [_kept(requests[index], one, size) for index, one, size in zip(left, tensors, rows)]
            self.waiting.take(came, jobs)
            return responses
        for index, answered in zip(left, self._answers(tensors)):
            responses[index] = answered
        self.waiting.done()
        return responses

    def finalize(self) -> None:
        self.waiting.stop()

    def _answers(self, tensors: Sequence[dict[str, np.ndarray]]) -> list[Any]:
        answers = self.front(tensors)
        self.metrics.publish(self.front.counts, self.waiting.refused)
        return [response(answer) for answer in answers]

    def _answer_later(self, jobs: Sequence[Job]) -> None:
        for job, answered in zip(jobs, self._answers([job.tensors for job in jobs])):
            _send(job, answered)


def _kept(request: Any, tensors: dict[str, np.ndarray], rows: int) -> Job:
    """What is left of a request when execute() has returned: Triton takes its memory back then."""
    return Job(request.get_response_sender(), {name: array.copy() for name, array in tensors.items()}, rows)


def _left(job: Job) -> bool:
    return bool(job.sender.is_cancelled())


def _refuse(job: Job, error: Exception) -> None:
    _send(job, response(error))


def _send(job: Job, answered: Any) -> None:
    try:
        job.sender.send(answered, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the client is gone
        pb_utils.Logger.log_verbose(f"a response could not be sent: {error}")

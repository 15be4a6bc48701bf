"""The adapter of an encoder to Triton's Python backend; emitted as model.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .encoder.front import open_front
from .encoder.transport import Metrics, response, tensors_of
from .tensors_check import check_tensors_survive


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        self.inputs = [field["name"] for field in json.loads(args["model_config"])["input"]]
        self.front = open_front(Path(args["model_repository"]) / args["model_version"])
        self.metrics = Metrics(args["model_name"], args["model_version"])

    def execute(self, requests: list[Any]) -> list[Any]:
        answers = self.front([tensors_of(request, self.inputs) for request in requests])
        self.metrics.publish(self.front.counts)
        return [response(answer) for answer in answers]

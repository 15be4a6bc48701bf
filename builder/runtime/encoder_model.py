"""The adapter of an encoder to Triton's Python backend; emitted as model.py. All it knows is how to carry tensors.

`self.model` is the Pipeline over the executor that serving.json names.
"""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from .contract import load_encoder
from .encoder.cpu_check import refuse_cpu
from .encoder.pipeline import Answer, Counts, Pipeline
from .fields import InputError, readable
from .tensors_check import check_tensors_survive


class Metrics:
    """Counters on Triton's own /metrics: engine calls, tokens of texts, and tokens that only pad a batch.

    Each increment is a message to the server, so they are sent with the first batch of each second.
    """

    def __init__(self, model: str, version: str) -> None:
        self.families = {  # kept: a metric dies with its family
            name: pb_utils.MetricFamily(
                name=f"build_repo_{name}_total", description=description, kind=pb_utils.MetricFamily.COUNTER
            )
            for name, description in (
                ("engine_calls", "Calls of the engine"),
                ("tokens", "Tokens of the texts, special tokens included"),
                ("padding_tokens", "Tokens added to texts to make them as long as their batch mates"),
            )
        }
        # of this version alone: a metric of another process with the same labels goes when the first of them ends
        labels = {"model": model, "version": version}
        self.counters = {name: family.Metric(labels=labels) for name, family in self.families.items()}
        self.sent = Counts()
        self.sent_at = 0.0

    def publish(self, counts: Counts) -> None:
        """Add what came since the last time."""
        if time.monotonic() - self.sent_at < 1:
            return
        tokens = counts.tokens - self.sent.tokens
        self.counters["engine_calls"].increment(counts.calls - self.sent.calls)
        self.counters["tokens"].increment(tokens)
        self.counters["padding_tokens"].increment(counts.padded_tokens - self.sent.padded_tokens - tokens)
        self.sent, self.sent_at = replace(counts), time.monotonic()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        check_tensors_survive()
        folder = Path(args["model_repository"]) / args["model_version"]
        config = json.loads(args["model_config"])
        self.inputs = [field["name"] for field in config["input"]]
        serving = load_encoder(folder)
        refuse_cpu(serving.not_on_cpus_with)
        executor = importlib.import_module(f".encoder.executors.{serving.executor}", __package__).Executor(
            folder, serving
        )
        self.model = Pipeline(folder, executor.infer, executor.map_calls)
        self.model.warm_up()
        self.metrics = Metrics(args["model_name"], args["model_version"])

    def execute(self, requests: list[Any]) -> list[Any]:
        answers = self.model([self._tensors(request) for request in requests])
        self.metrics.publish(self.model.counts)
        return [self._response(answer) for answer in answers]

    def _tensors(self, request: Any) -> dict[str, np.ndarray]:
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}

    def _response(self, answer: Answer) -> Any:
        if isinstance(answer, InputError):
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(readable(answer), pb_utils.TritonError.INVALID_ARG)
            )
        if isinstance(answer, Exception):
            pb_utils.Logger.log_error(f"{type(answer).__name__}: {readable(answer)}")
            message = f"this request failed inside the model: {type(answer).__name__}: {readable(answer)}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in answer.items()])

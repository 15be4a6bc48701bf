"""Triton's `backend: "openvino"` where the server has no C++ one: a Python-based backend.

It reads the same config.pbtxt fields as the stock backend: default_model_filename, INFERENCE_NUM_THREADS, NUM_STREAMS,
PERFORMANCE_HINT and HINT_BF16. Python-based backends: triton-inference-server/backend, docs/python_based_backends.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from builder.engines.openvino import HINT_BF16, MODEL_FILE, compiled


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Take config.pbtxt as it is: build-repo writes all of it."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: entry["string_value"] for key, entry in config.get("parameters", {}).items()}
        file = config.get("default_model_filename") or MODEL_FILE
        path = Path(args["model_repository"]) / args["model_version"] / file
        arithmetic = next(name for name, hint in HINT_BF16.items() if hint == parameters.get("HINT_BF16", "NO"))
        model = compiled(path, int(parameters.get("INFERENCE_NUM_THREADS", 0)), arithmetic)
        self.inputs = [value.any_name for value in model.inputs]
        self.outputs = [value.any_name for value in model.outputs]
        self.request = model.create_infer_request()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            feeds = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            self.request.infer(feeds, share_inputs=True)
            wanted = [name for name in self.outputs if name in request.requested_output_names()]
            tensors = [pb_utils.Tensor(name, self.request.get_tensor(name).data) for name in wanted]
        except Exception as error:  # whatever the graph raises belongs to this request alone
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"openvino error: {error}"))
        return pb_utils.InferenceResponse(tensors)

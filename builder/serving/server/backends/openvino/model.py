"""Python-based backend for `backend: "openvino"`, where the server has no C++ one.

It reads the same config.pbtxt fields as the stock backend of the model's release, refuses the same configurations
(builder/engines/stock.py), and refuses by name fields that it does not support itself. Python-based backends:
triton-inference-server/backend, docs/python_based_backends.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from builder.engines import openvino, stock

ABSENT = ("CPU_EXTENSION_PATH", "ENABLE_BATCH_PADDING", "RESHAPE_IO_LAYERS", "TARGET_DEVICE", "COMPILATION_NUM_THREADS")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Return config.pbtxt unchanged: build-repo writes all of it."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        self.config = json.loads(args["model_config"])
        path = stock.model_file(self.config, Path(args["model_repository"]), args["model_version"], openvino.MODEL_FILE)
        stock.refuse(self.config, openvino.signature(path), path)
        parameters = stock.parameters(self.config)
        absent = [name for name in ABSENT if name in parameters]
        if absent:
            raise RuntimeError(f"the embedded server's openvino backend has no {absent[0]}: serve it in the container")
        # here each instance is a process of its own; in the stock backend they share the model's threads
        instances = sum(int(group["count"]) for group in self.config["instance_group"])
        threads = int(parameters.get("INFERENCE_NUM_THREADS", 0)) // instances
        model = openvino.compiled(path, threads, "bf16" if "HINT_BF16" in parameters else "fp32")
        self.inputs = [value.any_name for value in model.inputs]
        self.outputs = [value.any_name for value in model.outputs]
        self.request = model.create_infer_request()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            feeds = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            wrong = stock.wrong_batch(self.config, len(next(iter(feeds.values()))))
            if wrong is not None:
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(wrong))
            self.request.infer(feeds, share_inputs=True)
            requested = [name for name in self.outputs if name in request.requested_output_names()]
            tensors = [pb_utils.Tensor(name, self.request.get_tensor(name).data) for name in requested]
        except Exception as error:  # an error of the graph belongs to this request alone
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"openvino error: {error}"))
        return pb_utils.InferenceResponse(tensors)

"""Python-based backend for `backend: "onnxruntime"`, where the server has no C++ one.

It reads the same config.pbtxt fields as the stock backend: default_model_filename, intra_op_thread_count,
inter_op_thread_count, optimization.graph.level and, for an instance on a GPU, gpu_mem_limit, arena_extend_strategy,
cudnn_conv_algo_search and the execution accelerator cuda. It refuses the same configurations as the stock backend of
the model's release (builder/engines/stock.py), and by name the accelerators that it does not support. Python-based
backends: triton-inference-server/backend, docs/python_based_backends.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from builder.common.releases import RELEASES
from builder.engines import stock
from builder.engines.cuda import NUMBERS
from builder.engines.onnxruntime import MODEL_FILE, SLOW_FUSIONS, signature
from builder.graphs.onnx.graph import check_release, read_graph
from builder.runtime.sessions import refuse_version_mismatch

LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,  # onnxruntime.cc, ModelState::ModelState
}


CUDA = "CUDAExecutionProvider"


def _providers(args: dict[str, str], config: stock.Config) -> list[Any]:
    """Return ONNX Runtime's providers, with options from the stock backend's numbers and the accelerator cuda."""
    parameters = stock.parameters(config)
    if args["model_instance_kind"] != "GPU":
        return ["CPUExecutionProvider"]
    options = {"device_id": args["model_instance_device_id"]}
    if "gpu_mem_limit" in parameters:
        options["gpu_mem_limit"] = parameters["gpu_mem_limit"]
    for name, values in NUMBERS.items():
        options[name] = {number: value for value, number in values.items()}[parameters.get(name, "0")]
    for accelerator in stock.accelerators(config):
        if accelerator["name"] != "cuda":
            raise RuntimeError(
                f"the embedded server's onnxruntime backend has no {accelerator['name']}: serve it in the container"
            )
        options |= accelerator.get("parameters", {})
    return [(CUDA, options), "CPUExecutionProvider"]


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Return config.pbtxt unchanged: build-repo writes all of it."""
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        path = stock.model_file(config, Path(args["model_repository"]), args["model_version"], MODEL_FILE)
        stock.refuse(config, signature(path), path)
        release = stock.release_of(path)
        if release in RELEASES:
            check_release(read_graph(path), release)
        parameters = stock.parameters(config)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
        options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
        level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
        options.graph_optimization_level = LEVELS.get(level, LEVELS[0])
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=_providers(args, config), disabled_optimizers=list(SLOW_FUSIONS)
        )
        refuse_version_mismatch(self.session)
        if args["model_instance_kind"] == "GPU" and CUDA not in self.session.get_providers():
            raise RuntimeError("this instance is for a GPU and CUDA did not start: install onnxruntime-gpu")
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            feeds = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            requested = [name for name in self.outputs if name in request.requested_output_names()]
            tensors = [pb_utils.Tensor(n, v) for n, v in zip(requested, self.session.run(requested, feeds))]
        except Exception as error:  # an error of the graph belongs to this request alone
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"onnx runtime error: {error}"))
        return pb_utils.InferenceResponse(tensors)

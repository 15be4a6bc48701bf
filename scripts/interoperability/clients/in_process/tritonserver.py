"""Triton's in-process Python API, as far as Dynamo's worker uses it, over the gRPC port of a server that runs.

NVIDIA's containers have the real module; no package index does. Dynamo's worker (dynamo.triton 1.6.1) runs unchanged on
this one. `TRITON_GRPC` is the address of the server, and `TRITON_MODELS`, if it is set, which of its models there are.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

ADDRESS = os.environ.get("TRITON_GRPC", "")
MODELS = os.environ.get("TRITON_MODELS", "").split()


class TritonError(Exception): ...


class MemoryType(enum.Enum):
    CPU = 0


class DataType(enum.Enum):
    BF16 = 0


class LogFormat(enum.Enum):
    DEFAULT = 0
    ISO8601 = 1


class RateLimitMode(enum.Enum):
    OFF = 0
    EXEC_COUNT = 1


class MemoryBuffer:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@dataclass
class Labels:
    """Name the classes of outputs, in their order, as the real response does."""

    outputs: list[list[str]]

    def output_classification_label(self, output: int, index: int) -> str | None:
        return self.outputs[output][index] if index < len(self.outputs[output]) else None


@dataclass
class Tensor:
    """Tensor in host memory."""

    array: np.ndarray
    memory_buffer: MemoryBuffer
    memory_type: MemoryType = MemoryType.CPU

    def to_bytes_array(self) -> np.ndarray:
        return self.array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@dataclass
class InferenceRequest:
    inputs: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class InferenceResponse:
    model: Model
    outputs: dict[str, Tensor]
    request_id: str = ""


class Model:
    """Model of the server."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self) -> bool:
        return bool(_call("ModelReady", service_pb2.ModelReadyRequest(name=self.name)).ready)

    def metadata(self) -> dict[str, Any]:
        return _as_dict(_call("ModelMetadata", service_pb2.ModelMetadataRequest(name=self.name)))

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = _as_dict(_call("ModelConfig", service_pb2.ModelConfigRequest(name=self.name)))
        return config["config"]

    def create_request(self) -> InferenceRequest:
        return InferenceRequest()

    async def async_infer(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        message = service_pb2.ModelInferRequest(model_name=self.name)
        for name, array in request.inputs.items():
            kind = np_to_triton_dtype(array.dtype)
            message.inputs.add(name=name, datatype=kind, shape=array.shape)
            raw = serialize_byte_tensor(array).item() if kind == "BYTES" and array.size else array.tobytes()
            message.raw_input_contents.append(raw)
        labels = self._labels(message)
        async with grpc.aio.insecure_channel(ADDRESS) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            async for response in stub.ModelStreamInfer(iter([message])):
                if response.error_message:
                    raise TritonError(response.error_message)
                outputs, raws = response.infer_response.outputs, response.infer_response.raw_output_contents
                owner = MemoryBuffer(owner=Labels([labels.get(output.name, []) for output in outputs]))
                tensors = zip(outputs, raws, strict=True)
                yield InferenceResponse(self, {output.name: _tensor(output, raw, owner) for output, raw in tensors})

    def _labels(self, message: service_pb2.ModelInferRequest) -> dict[str, list[str]]:
        """Return the labels that Triton has for outputs: it says them with the classes of a request, best first."""
        found = {}
        for output in self.config()["output"]:
            if output.get("label_filename"):
                request = service_pb2.ModelInferRequest()
                request.CopyFrom(message)
                asked = request.outputs.add(name=output["name"])
                asked.parameters["classification"].int64_param = math.prod(int(size) for size in output["dims"])
                answer = deserialize_bytes_tensor(_call("ModelInfer", request).raw_output_contents[0])
                classes = dict(text.decode().split(":", 2)[1:] for text in answer)
                found[output["name"]] = [classes[str(index)] for index in range(len(classes))]
        return found


class Server:
    """Server at ADDRESS, whatever the options say."""

    def __init__(self, **options: Any) -> None: ...

    def start(self, wait_until_ready: bool = False) -> None: ...

    def stop(self) -> None: ...

    def ready(self) -> bool:
        return bool(_call("ServerReady", service_pb2.ServerReadyRequest()).ready)

    def metrics(self) -> str:
        return ""

    def model(self, name: str) -> Model:
        return Model(name)

    def models(self, exclude_not_ready: bool = False) -> list[tuple[str, int]]:
        index = _call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=exclude_not_ready))
        return [(model.name, int(model.version)) for model in index.models if not MODELS or model.name in MODELS]


def _call(method: str, request: Any) -> Any:
    with grpc.insecure_channel(ADDRESS) as channel:
        return getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(request)


def _as_dict(message: Any) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _tensor(output: Any, raw: bytes, buffer: MemoryBuffer) -> Tensor:
    values = (
        deserialize_bytes_tensor(raw)
        if output.datatype == "BYTES"
        else np.frombuffer(bytearray(raw), triton_to_np_dtype(output.datatype))
    )
    return Tensor(values.reshape(output.shape), buffer)

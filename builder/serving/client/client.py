"""Call a running Triton over gRPC, converting values to tensors and back by the model's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from builder.common.errors import ServeError
from builder.common.tensors import WIRE_TYPES, to_tensors, to_values
from builder.runtime.fields import Field
from builder.serving.client.responses import Responses

IN_PIECES = ("stream", "streaming")  # inputs that request pieces: of this project and vLLM, and of TensorRT-LLM


@dataclass(frozen=True)
class Signature:
    """Tensors and parameters of a served model, from its configuration."""

    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    parameters: Mapping[str, str]
    max_batch_size: int = 1  # 0: tensors have no batch dimension
    streams: bool = False  # one request may have several responses

    @property
    def batched(self) -> bool:
        """True if tensors have a batch dimension."""
        return self.max_batch_size > 0

    @property
    def in_pieces(self) -> bool:
        """True if the model has the input `stream`, which requests the answer as pieces of new text."""
        return any(field.name == "stream" for field in self.inputs)


class Client:
    """Client of a model served by Triton. Raises ServeError for refusals of the server and failures of the network."""

    def __init__(self, url: str, name: str, timeout_s: float = 60) -> None:
        self.url, self.name, self.timeout_s = url, name, timeout_s
        self._client = grpc.InferenceServerClient(url)
        self.signature = self._signature()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def ask(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one sample. Raises SpecError for values that do not fit, ServeError for refusals."""
        if self.signature.streams:
            whole = {field.name: False for field in self.signature.inputs if field.name in IN_PIECES}
            return list(self.stream({**sample, **whole}))[-1]
        return self.ask_tensors(to_tensors(sample, self.signature.inputs))[0]

    def stream(self, sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the responses to one sample as they come. Raises ServeError; closing the iterator ends the request."""
        tensors = to_tensors(sample, self.signature.inputs, self.signature.batched)
        with closing(Responses(self.url, self._request(tensors), self.timeout_s)) as responses:
            for response in responses:
                result = grpc.InferResult(response)
                outputs = {field.name: result.as_numpy(field.name) for field in self.signature.outputs}
                present = {name: array for name, array in outputs.items() if array is not None}
                tensors = present if self.signature.batched else {name: a[None] for name, a in present.items()}
                if tensors:
                    yield to_values(tensors, self.signature.outputs)[0]

    def _request(self, tensors: Mapping[str, np.ndarray]) -> service_pb2.ModelInferRequest:
        types = {field.name: WIRE_TYPES[field.data_type] for field in self.signature.inputs}
        request = service_pb2.ModelInferRequest(model_name=self.name)
        for name, array in tensors.items():
            request.inputs.add(name=name, datatype=types[name], shape=array.shape)
            packed = serialize_byte_tensor(array).item() if types[name] == "BYTES" else array.tobytes()
            request.raw_input_contents.append(packed)
        return request

    def ask_rows(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answer samples with the same inputs, of the same sizes, as the rows of one request.

        Answers of unequal lengths are padded. Raises SpecError for values that do not fit, ServeError.
        """
        rows = [to_tensors(sample, self.signature.inputs) for sample in samples]
        return self.ask_tensors({name: np.concatenate([row[name] for row in rows]) for name in rows[0]})

    def ask_tensors(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
        """Answer a batch of rows given as tensors with a batch dimension."""
        inputs = self._inputs(tensors)
        with self._asking():
            result = self._client.infer(self.name, inputs, client_timeout=self.timeout_s)
        outputs = {field.name: result.as_numpy(field.name) for field in self.signature.outputs}
        return to_values({n: a for n, a in outputs.items() if a is not None}, self.signature.outputs)

    def _inputs(self, tensors: Mapping[str, np.ndarray]) -> list[Any]:
        types = {field.name: WIRE_TYPES[field.data_type] for field in self.signature.inputs}
        return [
            grpc.InferInput(name, list(array.shape), types[name]).set_data_from_numpy(array)
            for name, array in tensors.items()
        ]

    def statistics(self) -> dict[str, Any]:
        """Return Triton's statistics of the model's newest version since it was loaded: its entry of `model_stats`."""
        with self._asking():
            versions = self._client.get_inference_statistics(self.name, as_json=True)["model_stats"]
        return dict(max(versions, key=lambda entry: int(entry["version"])))

    def server(self) -> str:
        """Return the server's name and version."""
        with self._asking():
            metadata = self._client.get_server_metadata(as_json=True)
        return f"{metadata['name']} {metadata['version']}"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raise ServeError for errors of the server and lost connections."""
        try:
            yield
        except InferenceServerException as error:
            raise ServeError(f"{self.name}: {error.message()}") from error

    def _signature(self) -> Signature:
        try:
            config = self._client.get_model_config(self.name, as_json=True)["config"]
        except InferenceServerException as error:
            self._client.close()
            if "UNAVAILABLE" in str(error.status()):
                raise ServeError(f"no Triton answers at {self.url} over gRPC; start one: build-repo serve") from error
            raise ServeError(f"{self.name} is not served at {self.url}: {error.message()}") from error
        parameters = {key: entry["string_value"] for key, entry in config.get("parameters", {}).items()}
        streams = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        most = int(config.get("max_batch_size", 0))
        return Signature(_fields(config["input"]), _fields(config["output"]), parameters, most, streams)


def _fields(entries: list[dict[str, Any]]) -> tuple[Field, ...]:
    return tuple(
        Field(e["name"], e["data_type"], tuple(int(d) for d in e["dims"]), bool(e.get("optional", False)))
        for e in entries
    )

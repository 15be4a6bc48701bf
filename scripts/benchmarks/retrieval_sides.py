"""Sides of `scripts/bench retrieval`: this project behind Triton, and the servers and libraries people run instead."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.common.machine import available_cores
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks import peers
from scripts.benchmarks.embedding_servers import Door, infinity, serving
from scripts.benchmarks.retrieval_models import RetrievalModel

TEXT_EMBEDDINGS_INFERENCE = (
    "text-embeddings-inference is not on a package index. Its CPU image runs ONNX Runtime through ort, where a model "
    "has an ONNX file (that side's kernels are those of sentence-transformers ONNX), and candle otherwise."
)
REFERENCE = "sentence-transformers PyTorch"  # the answers that all others are compared with
BITS = ("fp32", "bf16", "int8", "int8-weights")
KINDS = ("embed", "rerank", "late")


@dataclass(frozen=True)
class PeerSide:
    """Library behind FastAPI, or a server of its own: its environment, and what it runs."""

    environment: str
    precisions: tuple[str, ...]
    kinds: tuple[str, ...] = ("embed",)
    converter: str = ""  # environment that converts its files


LIBRARIES: dict[str, PeerSide] = {
    "sentence-transformers ONNX": PeerSide("retrieval_onnx", ("fp32", "int8"), converter="retrieval_onnx"),
    "sentence-transformers OpenVINO": PeerSide("retrieval_openvino", BITS, KINDS, "retrieval_openvino"),
    "sentence-transformers OpenVINO dynamic": PeerSide("retrieval_openvino", ("int8",), KINDS, "retrieval_openvino"),
    REFERENCE: PeerSide("retrieval_openvino", ("fp32", "bf16"), KINDS),
    "FastEmbed": PeerSide("retrieval_fastembed", ("fp32", "int8"), converter="retrieval_onnx"),
    "openvino-genai": PeerSide("retrieval_genai", BITS, ("embed", "rerank"), "retrieval_openvino"),
}
SERVERS: dict[str, PeerSide] = {
    "infinity torch": PeerSide("infinity_peer", ("fp32",)),
    "infinity optimum": PeerSide("infinity_optimum_peer", ("fp32",)),
    "vLLM": PeerSide("retrieval_vllm", ("fp32", "bf16")),
}
PEERS = {**LIBRARIES, **SERVERS}


def triton_door(port: int, kind: str) -> Door:
    """Return Triton's HTTP endpoint of the model `encoder`; the numbers come as bytes behind the JSON."""

    def tensor(name: str, values: list[str]) -> dict[str, Any]:
        return {"name": name, "datatype": "BYTES", "shape": [1, len(values)], "data": values}

    def body(request: Any) -> dict[str, Any]:
        if kind == "embed":
            inputs, output = [tensor("text_input", [request])], "embedding"
        else:
            inputs = [tensor("query", [request["query"]]), tensor("documents", request["documents"])]
            output = "score"
        return {"inputs": inputs, "outputs": [{"name": output, "parameters": {"binary_data": True}}]}

    return Door(port, "/v2/models/encoder/infer", body, _binary)


def _binary(content: bytes) -> list[float]:
    head, _ = json.JSONDecoder().raw_decode(content.decode("latin-1"))
    size = head["outputs"][0]["parameters"]["binary_data_size"]
    numbers: list[float] = np.frombuffer(content[-size:], np.float32).tolist()
    return numbers


@contextmanager
def ours(repository: Path, kind: str) -> Iterator[Door]:
    """Serve a built repository."""
    with running(repository) as server:
        yield triton_door(server.ports.http, kind)


def peer(
    name: str, model: RetrievalModel, folder: Path, precision: str, environments: Path
) -> AbstractContextManager[Door]:
    """Serve `folder`, which belongs to this peer alone. Raises PeerError."""
    if name.startswith("infinity"):
        served: AbstractContextManager[Door] = infinity(
            folder, name.removeprefix("infinity "), environments, model.pooling
        )
        return served
    side = PEERS[name]
    python, port = peers.interpreter(side.environment, environments), free_ports().http
    if name == "vLLM":
        return _vllm(python, folder, port, precision)
    converted = folder / f"converted-{name.replace(' ', '-')}-{precision}"
    if side.converter and not converted.exists():
        converter = peers.interpreter(side.converter, environments)
        peers.run_command([converter, peers.FOLDER / "retrieval_libraries.py", name, model.kind, folder, precision])
        converted.touch()
    command = [python, peers.FOLDER / "retrieval_app.py", port, name, model.kind, folder, precision, available_cores()]
    door = Door(
        port,
        f"/{model.kind}",
        _body if model.kind == "embed" else _ranked_body,
        lambda content: json.loads(content)["answer"],
    )
    opened: AbstractContextManager[Door] = serving([str(word) for word in command], door, {})
    return opened


def _body(text: str) -> dict[str, Any]:
    return {"text": text}


def _ranked_body(request: Any) -> dict[str, Any]:
    """Return a request to a ranker; a text alone, as `serving` sends it, is a query with itself."""
    return {"query": request, "documents": [request]} if isinstance(request, str) else request


def _vllm(python: Path, folder: Path, port: int, precision: str) -> AbstractContextManager[Door]:
    """Run vLLM's server with its pooling runner. Its own command looks for a package named vllm and fails."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--runner", "pooling"]
    command += [
        "--dtype",
        {"fp32": "float32", "bf16": "bfloat16"}[precision],
        "--served-model-name",
        "m",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    door = Door(port, "/v1/embeddings", lambda text: {"model": "m", "input": [text]})
    opened: AbstractContextManager[Door] = serving(command, door, environment)
    return opened

"""OpenVINO as an engine: its intermediate representation, its sessions, its parameters in Triton.

It takes standard ONNX operators only and fuses attention itself. On a CPU with AVX512_BF16 or AMX it can multiply in
bfloat16, and does so by default: what is to be exact must say so. Knows files and threads; knows nothing about
checkpoints or tasks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino

from builder.engines import Infer
from builder.errors import ExportError

if TYPE_CHECKING:
    from builder.export.graph import Graph

BACKEND = "openvino"
MODEL_FILE = "model.xml"
ARITHMETIC = {"fp32": "f32", "bf16": "bf16"}
HINT_BF16 = {"fp32": "NO", "bf16": "YES"}  # the name and values of Triton's backend


def convert(graph: Graph, path: Path, arithmetic: str, half_weights: bool) -> Graph:
    """Write an ONNX graph as model.xml and model.bin; with `half_weights`, real constants are stored as fp16.

    Raises ExportError where OpenVINO does not read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        model = openvino.Core().read_model(str(graph.path))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise ExportError(f"OpenVINO does not read this graph: {reason}. Use --engine onnxruntime") from error
    openvino.save_model(model, str(path), compress_to_fp16=half_weights)
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))
    return replace(graph, path=path, engine=BACKEND, arithmetic=arithmetic, size=size)


def infer(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open `graph`, an .xml of `convert`. OpenVINO's threads do not spin: `spinning` has no effect."""
    request = compiled(graph.path, threads, graph.arithmetic).create_infer_request()
    outputs = list(graph.outputs)

    def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        request.infer(feeds, share_inputs=True)
        return {name: request.get_tensor(name).data.copy() for name in outputs}

    return run


def compiled(path: Path, threads: int, arithmetic: str) -> Any:
    """The model on the CPU, one stream of `threads` threads, products in `arithmetic`."""
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": ARITHMETIC[arithmetic],
    }
    core = openvino.Core()
    return core.compile_model(core.read_model(str(path)), "CPU", settings)


def signature(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the inputs and outputs of an .xml. Raises RuntimeError where it cannot be read."""
    model = openvino.Core().read_model(str(path))
    return tuple(value.any_name for value in model.inputs), tuple(value.any_name for value in model.outputs)


def parameters(graph: Graph, threads: int, spinning: bool) -> dict[str, str]:
    """What Triton's OpenVINO backend reads. Its batch axis stays as it is in the graph: of any size."""
    return {
        "INFERENCE_NUM_THREADS": str(threads),
        "NUM_STREAMS": "1",
        "PERFORMANCE_HINT": "LATENCY",
        "HINT_BF16": HINT_BF16[graph.arithmetic],
        "SKIP_OV_DYNAMIC_BATCHSIZE": "YES",
    }

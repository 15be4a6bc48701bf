"""ONNX Runtime: its sessions, and facts that are read from its graphs.

Knows files and threads; knows nothing about checkpoints or tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from builder.common.workplace import temporary_folder
from builder.engines import Infer
from builder.engines.stock import Signature, Tensor
from builder.graphs.onnx.graph import MODEL_FILE as MODEL_FILE
from builder.graphs.onnx.graph import Graph, load_whole, save_graph
from builder.graphs.onnx.rounding import rounded
from builder.runtime.contract import Session
from builder.runtime.lora import LoraStacks

BACKEND = "onnxruntime"
TYPES = {"FLOAT": "TYPE_FP32", "FLOAT16": "TYPE_FP16", "DOUBLE": "TYPE_FP64", "BFLOAT16": "TYPE_BF16"}
# Fusions that ONNX Runtime 1.31 runs slower than the operators they replace (MiniLM in int8: 1.36x with it left out,
# measured with version 0.2.0). They are neither saved in a graph nor applied at load; 1.19 gains from this one, and
# applies it when it loads the graph.
SLOW_FUSIONS = ("SkipLayerNormFusion",)
# It turns a product with constant weights after a scale into FusedMatMul, which quantisation does not know.
HIDING_FUSIONS = ("MatMulScaleFusion",)
SPIN = "session.intra_op.allow_spinning"
REST = "session.force_spinning_stop"  # when a call ends
# No second copy of the matrices in the kernels' own order: products read the mapped weights.
# Source: ONNX Runtime, include/onnxruntime/core/session/onnxruntime_session_options_config_keys.h
MAPPED = {"session.disable_prepacking": "1"}


def open_session(model: Path, threads: int, spinning: bool = False) -> onnxruntime.InferenceSession:
    """Open `model` on the CPU with `threads` intra-operator threads, which spin within a call at most."""
    return _session(model, _options(threads, spinning))


def open_unoptimised(model: Path, threads: int) -> onnxruntime.InferenceSession:
    """Open `model` with every node as it is, as ONNX Runtime's calibrators open one."""
    options = _options(threads, spinning=False)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _session(model, options)


def save_optimised(model: Path, written: Path, extended: bool, approximate_gelu: bool) -> None:
    """Write `model` as ONNX Runtime rewrites it, for any hardware: its level "basic", or "extended" with fusions.

    Weights that `model` has in another file stay there, and `written` refers to them as `model` does; those that it
    rewrites are inside.
    """
    options = _options(threads=1, spinning=False)
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if extended else levels.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(written)
    options.add_session_config_entry("optimization.enable_gelu_approximation", "1" if approximate_gelu else "0")
    for key, value in MAPPED.items():  # the session is not run
        options.add_session_config_entry(key, value)
    _session(model, options, (*SLOW_FUSIONS, *HIDING_FUSIONS))


def _options(threads: int, spinning: bool) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(SPIN, "1" if spinning else "0")
    if spinning:
        options.add_session_config_entry(REST, "1")
    return options


def _session(
    model: Path, options: onnxruntime.SessionOptions, without: Sequence[str] = SLOW_FUSIONS
) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        str(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
    )


def run_with(session: onnxruntime.InferenceSession) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return an `infer` callable for the emitted pipeline: named arrays in, named arrays out; rows have no adapter."""
    names = [output.name for output in session.get_outputs()]
    lora = LoraStacks.of((value.name, value.shape) for value in session.get_inputs())

    def infer(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, feeds if lora is None else lora.beside(feeds)), strict=True))

    return infer


def infer(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open `graph`: named arrays in, named arrays out.

    No CPU kernel has bf16, and few have fp16: a graph for a GPU in one of them is opened in fp32, and rounded to it.
    """
    if graph.arithmetic == "fp32":
        return run_with(open_session(graph.path, threads, spinning))
    with temporary_folder() as folder:
        stand_in = folder / MODEL_FILE
        save_graph(rounded(load_whole(graph.path)), stand_in)
        return run_with(open_session(stand_in, threads, spinning))


def infer_mapped(graph: Graph, threads: int) -> Infer:
    """Open a graph in fp32 with its weights in their file alone, which is mapped: less memory, and slower."""
    options = _options(threads, spinning=False)
    for key, value in MAPPED.items():
        options.add_session_config_entry(key, value)
    return run_with(_session(graph.path, options))


def loop_session(threads: int, spinning: bool) -> Session:
    """Return how emitted code opens its graphs on the CPU; 0 `threads`: all cores that it finds."""
    return Session(threads=threads, entries={SPIN: "1" if spinning else "0"})


def parameters(graph: Graph, threads: int, instances: int) -> dict[str, str]:
    """Return the parameters of Triton's ONNX Runtime backend, which has none for session entries, such as spinning."""
    return {"intra_op_thread_count": str(threads), "inter_op_thread_count": "1"}


def resting(session: Session) -> Session:
    """Return `session`, whose threads spin within a call at most.

    Source of the entry: ONNX Runtime, include/onnxruntime/core/session/onnxruntime_session_options_config_keys.h
    """
    return replace(session, entries={**session.entries, REST: "1"}) if session.entries[SPIN] == "1" else session


def signature(path: Path) -> Signature:
    """Return the inputs and outputs of an ONNX file."""
    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}  # old files declare them as inputs too
    inputs = [value for value in graph.input if value.name not in weights]
    return Signature(*({value.name: _tensor(value) for value in side} for side in (inputs, graph.output)))


def _tensor(value: onnx.ValueInfoProto) -> Tensor:
    described = value.type.tensor_type
    name = onnx.TensorProto.DataType.Name(described.elem_type)
    return Tensor(TYPES.get(name, f"TYPE_{name}"), tuple(size.dim_value or -1 for size in described.shape.dim))


def external_files(path: Path) -> dict[str, int]:
    """Return the files beside an ONNX file that hold its weights, and how many bytes of each it reads at least.

    Fields: ONNX, docs/ExternalData.md.
    """
    files: dict[str, int] = {}
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location == onnx.TensorProto.EXTERNAL and "location" in entries:
            end = sum(int(entries.get(key, "0") or 0) for key in ("offset", "length"))
            files[entries["location"]] = max(files.get(entries["location"], 0), end)
    return files


def open_clips(path: Path) -> bool:
    """Return True if the graph in `path` has a Clip without an upper bound, and weights or tensors in fp16."""
    graph = onnx.load(str(path), load_external_data=False).graph
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer)
    return half and any(node.op_type == "Clip" and len([*filter(None, node.input)]) < 3 for node in graph.node)

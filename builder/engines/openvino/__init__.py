"""OpenVINO: its intermediate representation, its sessions, its parameters in Triton.

It takes standard ONNX operators only and fuses attention itself. On a CPU with AVX512_BF16 or AMX it multiplies in
bfloat16 by default, and no parameter of Triton's backend changes that: HINT_BF16 is YES or absent. Builds therefore use
the default too. The library is loaded where it is used: every build looks at what each engine has, and most use one.
Knows files and threads; knows nothing about checkpoints or tasks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.common.engines import ENGINES
from builder.common.errors import ExportError
from builder.engines import Infer
from builder.engines.stock import Signature, Tensor
from builder.runtime.contract import CacheType

if TYPE_CHECKING:
    from builder.graphs.onnx.graph import Graph

BACKEND = "openvino"
MODEL_FILE = ENGINES[BACKEND].model_file
TYPES = {"i64": "TYPE_INT64", "i32": "TYPE_INT32", "f32": "TYPE_FP32", "f16": "TYPE_FP16", "boolean": "TYPE_BOOL"}
ACTIVATIONS = 128  # inputs of a product with small weights that are rounded to 8 bits with one scale
BF16 = ("avx512_bf16", "amx_bf16")  # a CPU with one of these multiplies in bfloat16


def convert(graph: Graph, path: Path, arithmetic: str, half_weights: bool) -> Graph:
    """Write an ONNX graph as model.xml and model.bin; with `half_weights`, real constants are stored as fp16.

    The file itself says in which groups activations are rounded beside weights in blocks, as no parameter of Triton's
    backend can. Raises ExportError if OpenVINO does not read the graph.
    """
    from builder.runtime.open_vino import openvino
    from builder.runtime.openvino_experts import expert_extensions

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        core = openvino.Core()
        core.add_extension(expert_extensions())
        model = core.read_model(str(graph.path))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise ExportError(f"OpenVINO does not read this graph: {reason}. Use --engine onnxruntime") from error
    if graph.operators["MatMulNBits"]:
        model.set_rt_info(str(ACTIVATIONS), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    openvino.save_model(model, str(path), compress_to_fp16=half_weights)
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))
    return replace(graph, path=path, engine=BACKEND, arithmetic=arithmetic, size=size)


def infer(graph: Graph, threads: int) -> Infer:
    """Open `graph`, an .xml of `convert`."""
    request = compiled(graph.path, threads, graph.arithmetic).create_infer_request()
    outputs = list(graph.outputs)

    def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        request.infer(feeds, share_inputs=True, share_outputs=True)  # copied below, once
        return {name: request.get_tensor(name).data.copy() for name in outputs}

    return run


def compiled(path: Path, threads: int, arithmetic: str) -> Any:
    """Return the model on the CPU as Triton's backend has it: one stream of `threads` threads.

    Products are in `arithmetic`. Raises ExportError if this CPU multiplies in bfloat16 and the model is not for
    that.
    """
    from builder.runtime.open_vino import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    if arithmetic == "bf16":
        settings["INFERENCE_PRECISION_HINT"] = "bf16"
    core = openvino.Core()
    model = core.compile_model(core.read_model(str(path)), "CPU", settings)
    computed = model.get_property("INFERENCE_PRECISION_HINT").to_string()
    if arithmetic == "fp32" and computed != "f32":
        raise ExportError(
            f"OpenVINO computes in {computed} on this CPU and {path.name} was verified in f32; Triton's backend cannot "
            "be told: build it on a CPU like this one, or with --engine onnxruntime"
        )
    return model


def decoder_properties(cache: CacheType) -> dict[str, str]:
    """Return the CPU plugin's properties for a decode loop.

    Products in fp32, whatever the CPU is fast at, and 8-bit ones in groups; keys and values in fp32, fp16 or bytes.
    Bytes of keys have one scale a token. OpenVINO's default is one a channel and block: each new token then rounds the
    block's earlier ones anew, and a rejected guess leaves a trace. No thread is bound to a core: Triton's threads
    and the loop's run beside a step, and the whole step would wait for a bound thread whose core they have
    (GPT-2, two cores: about a tenth more tokens a second at 8 and at 16 rows).
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": "NO",
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(ACTIVATIONS),
        "KV_CACHE_PRECISION": {"float32": "f32", "float16": "f16", "uint8": "u8"}[cache],
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
    }


def arithmetic_on(flags: Collection[str]) -> str:
    """Return the type in which OpenVINO multiplies on a CPU with the instruction sets `flags`: fp32 or bf16."""
    return "bf16" if set(BF16) & set(flags) else "fp32"


def signature(path: Path) -> Signature:
    """Return the inputs and outputs of an .xml. Raises RuntimeError if it cannot be read."""
    from builder.runtime.open_vino import openvino

    model = openvino.Core().read_model(str(path))
    return Signature(*({value.any_name: _tensor(value) for value in side} for side in (model.inputs, model.outputs)))


def _tensor(value: Any) -> Tensor:
    shape = tuple(size.get_length() if size.is_static else -1 for size in value.partial_shape)
    return Tensor(TYPES.get(value.element_type.to_string(), value.element_type.to_string()), shape)


def parameters(graph: Graph, threads: int, instances: int) -> dict[str, str]:
    """Return the parameters of Triton's OpenVINO backend: instances share one compiled model, with a stream each."""
    numbers = {
        "INFERENCE_NUM_THREADS": str(threads * instances),
        "NUM_STREAMS": str(instances),
        "PERFORMANCE_HINT": "LATENCY",
    }
    return {**numbers, "HINT_BF16": "YES"} if graph.arithmetic == "bf16" else numbers

"""ONNX Runtime as an engine: on the CPU, on a GPU by CUDA, and on a GPU by its own TensorRT.

Options of its backend: triton-inference-server/onnxruntime_backend, README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from builder.common.errors import SpecError
from builder.common.machine import SEVEN_BITS, VNNI, largest_byte_weight
from builder.common.releases import runtime_of, version_tuple
from builder.engines import GraphEngine, Infer, onnxruntime
from builder.engines.cuda import NUMBERS, attention_kernels, provider_options
from builder.engines.onnxruntime.saturation import overflows
from builder.engines.placement import TOKEN_INPUTS, Accelerator, InstanceGroup, Placement, on_cpu
from builder.engines.profiles import Calls, input_shapes, profiles_of
from builder.engines.stock import Signature
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec, Gpu
from builder.runtime.contract import Session
from builder.runtime.recipe.compile import sha256

CUDA_OPTIONS_SINCE = "24.06"  # Triton's backend passes them on: onnxruntime_backend, pull request 256
PRECISION_MODES = {"fp16": "FP16", "int8-static": "INT8"}  # the modes of TensorRT that the graph's own types need


class OnnxRuntime(GraphEngine):
    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        return onnxruntime.infer(graph, threads, spinning)

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        """Place instances on `options.target`. Raises SpecError for an option that the backend cannot take."""
        if options.target == "cpu":
            return on_cpu(options, onnxruntime.parameters(graph, options.threads_per_instance, options.instances))
        groups = (InstanceGroup(options.instances, "KIND_GPU", tuple(options.gpu.devices)),)
        settings = _cuda_parameters(options.gpu)
        if options.target == "cuda":
            return Placement(groups, settings, accelerators=_cuda_accelerators(options))
        (profile,) = profiles_of(options.tensorrt.profiles, calls, plan=False)
        shapes = input_shapes(profile, graph.inputs, TOKEN_INPUTS)
        accelerator = Accelerator("tensorrt", _tensorrt_parameters(options, graph, shapes))
        tuned = {name: sides["opt"] for name, sides in shapes.items()}
        accelerators = (accelerator, *_cuda_accelerators(options))
        return Placement(groups, settings, accelerators=accelerators, warm_ups=(tuned,))

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session:
        """Return the session of an encoder in process. Its threads spin within a call and rest after it.

        By default each spins for many times as long as a short text takes, on cores that are needed to send the answer.
        """
        return onnxruntime.resting(onnxruntime.loop_session(threads, spinning))

    def served_version(self, triton: str, in_process: bool) -> str:
        return runtime_of(triton, in_process)

    def half_constants(self, graph: Graph) -> bool:
        constants = onnx.load(str(graph.path), load_external_data=False).graph.initializer
        return any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in constants)

    def needed_cpus(self, graph: Graph) -> tuple[str, ...]:
        """Return VNNI for products that overflow without it, unless the answers were verified without it."""
        return VNNI if largest_byte_weight() > SEVEN_BITS and overflows(graph.path) else ()

    def signature(self, model: Path) -> Signature:
        return onnxruntime.signature(model)


def _cuda_parameters(gpu: Gpu) -> dict[str, str]:
    named = provider_options(gpu)
    numbered = {name: numbers[named[name]] for name, numbers in NUMBERS.items()}
    numbered["intra_op_thread_count"] = "1"  # the CPU computes shapes only
    passed = {name: value for name, value in named.items() if name not in (*NUMBERS, "use_tf32")}
    return {**numbered, **passed}


def _cuda_accelerators(options: BuildSpec) -> tuple[Accelerator, ...]:
    """Return CUDA's own options: fp32 is multiplied as fp32, which was compared, not as TF32. Raises SpecError."""
    if version_tuple(options.triton) >= version_tuple(CUDA_OPTIONS_SINCE):
        kernels = attention_kernels(options.gpu.card, options.precision, options.triton)
        return (Accelerator("cuda", {"use_tf32": provider_options(options.gpu)["use_tf32"], **kernels}),)
    if options.precision != "fp32":
        return ()
    raise SpecError(
        f"the ONNX Runtime backend of Triton {options.triton} multiplies fp32 as TF32 on a GPU and takes no option "
        f"against it: use --precision fp16, or --triton {CUDA_OPTIONS_SINCE} or later"
    )


def _tensorrt_parameters(
    options: BuildSpec, graph: Graph, shapes: Mapping[str, Mapping[str, tuple[int, int]]]
) -> dict[str, str]:
    """Return parameters of ONNX Runtime's TensorRT: an explicit profile, and caches of engines and timings.

    It names a cached engine by the model's name and tensors, not by its weights: the graph's hash in the path keeps a
    retrained model from running on the engine of the one before. It creates one folder, not those above it.
    """

    def listed(side: str) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, sides[side]))}" for name, sides in shapes.items())

    folder = f"{options.tensorrt.engine_folder.rstrip('/')}/{options.engine_name}-{sha256(*graph.files)[:16]}"
    parameters = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
        "trt_builder_optimization_level": str(options.tensorrt.optimization_level),
        **{f"trt_profile_{side}_shapes": listed(side) for side in ("min", "opt", "max")},
    }
    if options.precision in PRECISION_MODES:
        parameters["precision_mode"] = PRECISION_MODES[options.precision]
    if options.tensorrt.workspace_mb is not None:
        parameters["max_workspace_size_bytes"] = str(options.tensorrt.workspace_mb << 20)
    return parameters


ENGINE = OnnxRuntime()
